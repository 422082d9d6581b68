"""Routing replay where layers are computed again in the backward pass, and where they are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.testing import Runs, assert_replays
from plugins.fsdp.tests import ranks


# On one rank where they are compiled: each takes ten seconds. `test_options.py` has compiled layers on two.
@pytest.mark.parametrize(("compiled", "world_size"), [(False, 2), (True, 1)], ids=["traced by nobody", "compiled"])
def test_recomputed_layers_go_through_the_experts_that_they_were_told(
    runs: Runs, compiled: bool, world_size: int
) -> None:
    setup = runs.setup("fsdp", "qwen3-moe")
    setup = evolve(setup, options={"compile": compiled}, train=evolve(setup.train, recompute="full"))
    assert_replays(
        Path(setup.model), lambda samples: runs.rank_sets[world_size].run(ranks.replayed, setup, samples, 0.02)
    )
