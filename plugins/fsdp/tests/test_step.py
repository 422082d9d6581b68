"""Steps with a fused AdamW, as on GPUs, against plain torch's clipping and AdamW."""

from __future__ import annotations

import pytest
from attrs import evolve

from corerl_testing import Runs, Setup, assert_follows
from plugins.fsdp.tests import ranks

STEPS = range(3)


def clipped_at(setup: Setup, limit: float) -> Setup:
    optimizer = evolve(setup.train.optimizer, clip_norm=limit)
    return evolve(setup, train=evolve(setup.train, optimizer=optimizer))


@pytest.mark.parametrize("limit", [0.05, 1e3])
def test_fused_steps_follow_plain_torch_on_one_rank_and_two(runs: Runs, limit: float) -> None:
    setup = clipped_at(runs.setup("fsdp", "qwen3"), limit)
    fused = evolve(setup, backend=f"{ranks.__name__}:StepsFused.spec")
    wanted = runs.train(1, evolve(setup, backend="plain"), STEPS)
    assert [norm > limit for norm in wanted.grad_norms] == [limit < 1.0] * len(STEPS)
    for world_size in (1, 2):
        assert_follows(runs.train(world_size, fused, STEPS), wanted)
