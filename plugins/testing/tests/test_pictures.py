"""How often pictures go through a rank's tower."""

from __future__ import annotations

from typing import Literal

import pytest
from attrs import evolve

from corerl_testing import Runs
from corerl_testing.scenarios.pictures import FIELDS, pictures_encoded


@pytest.mark.parametrize(("tower", "counts"), [("frozen", [2, 4]), ("trained", [2, 6])])
def test_a_rank_encodes_each_picture_once_a_pass(
    runs: Runs, tower: Literal["frozen", "trained"], counts: list[int]
) -> None:
    """Two pictures, which several rows show, before and after a step; one that trains the tower has a pass more."""
    setup = evolve(runs.setup("fsdp", "qwen3"), model="", fields=FIELDS, pictures="vision", tower=tower)
    assert runs.rank_sets[1].run(pictures_encoded, setup) == [counts]
