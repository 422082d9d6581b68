"""Routing replay and balancing where layers are computed again in the backward pass, and where they are compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from attrs import evolve

from corerl_testing import PACKINGS, Runs, assert_balances, assert_replays
from corerl_testing.scenarios import training
from plugins.fsdp.tests import ranks


# On one rank where they are compiled: each takes ten seconds. `test_options.py` has compiled layers on two.
@pytest.mark.parametrize(
    ("compiled", "world_size"),
    [pytest.param(False, 2, id="traced by nobody"), pytest.param(True, 1, id="compiled", marks=pytest.mark.nightly)],
)
def test_recomputed_layers_go_through_the_experts_that_they_were_told(
    runs: Runs, compiled: bool, world_size: int
) -> None:
    setup = runs.setup("fsdp", "qwen3-moe")
    setup = evolve(setup, options={"compile": compiled}, train=evolve(setup.train, recompute="full"))
    run = partial(runs.rank_sets[world_size].run, ranks.traced, training.replay_experts, setup)
    assert_replays(Path(setup.model), lambda samples: run(samples, 0.02))


@pytest.mark.nightly
def test_recomputed_compiled_layers_are_balanced_as_in_transformers(runs: Runs) -> None:
    setup = runs.setup("fsdp", "qwen3-moe", PACKINGS["one by one"])
    setup = evolve(setup, options={"compile": True}, train=evolve(setup.train, recompute="full"))
    assert_balances(Path(setup.model), setup, partial(runs.rank_sets[1].run, ranks.traced, training.first_step))
