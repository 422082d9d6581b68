"""Routing replay and balancing where layers are computed again in the backward pass; without that the conformance suite
sees it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from attrs import evolve

from corerl_testing import PACKINGS, Runs, assert_balances, assert_replays
from corerl_testing.scenarios import training


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_layers_go_through_the_experts_that_they_were_told(runs: Runs, stage: int) -> None:
    setup = runs.setup("deepspeed", "qwen3-moe")
    setup = evolve(setup, options={"stage": stage}, train=evolve(setup.train, recompute="full"))
    assert_replays(
        Path(setup.model), lambda samples: runs.rank_sets[2].run(training.replay_experts, setup, samples, 0.02)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputed_layers_are_balanced_as_in_transformers(runs: Runs, stage: int) -> None:
    setup = runs.setup("deepspeed", "qwen3-moe", PACKINGS["one by one"])
    setup = evolve(setup, options={"stage": stage}, train=evolve(setup.train, recompute="full"))
    assert_balances(Path(setup.model), setup, partial(runs.rank_sets[2].run, training.first_step))
