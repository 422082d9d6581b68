"""Routing replay where layers are computed again in the backward pass, and where they are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.testing.pool import RankPool
from corerl.testing.routing import assert_replays
from corerl.testing.subject import Runs
from plugins.fsdp.tests import ranks


@pytest.mark.parametrize("compiled", [False, True], ids=["traced by nobody", "compiled"])
def test_recomputed_layers_go_through_the_experts_that_they_were_told(
    runs: Runs, rank_pool: RankPool, compiled: bool
) -> None:
    setup = runs.setup("fsdp", "qwen3-moe")
    setup = evolve(setup, options={"compile": compiled}, train=evolve(setup.train, recompute="full"))
    assert_replays(Path(setup.model), lambda samples: rank_pool.run(ranks.replayed, setup, samples, 0.02))
