"""Gradients reach the optimizer in the step that they belong to, and in no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve

from corerl.errors import Unsupported
from corerl_testing import GRAD_NORM, Runs, Setup
from plugins.deepspeed.tests import ranks
from plugins.deepspeed.tests.ranks import Skip

SUMS = [{"stage": 1}, {"stage": 2}]  # what is missing counts as zeros
KEEPS = [
    {"stage": 2, "offload": "optimizer"},
    {"stage": 3},
]
SKIPS = [Skip(step=1, micro_batches=(0,)), Skip(step=1, micro_batches=(-1,))]


def in_bfloat16(runs: Runs, options: Mapping[str, Any]) -> Setup:
    setup = evolve(runs.setup("deepspeed", "qwen3-tied"), options=options)
    return evolve(setup, train=evolve(setup.train, precision="bfloat16"))


def on_one_rank(runs: Runs, function: Any, setup: Setup, *args: Any, **more: Any) -> Any:
    (found,) = runs.rank_sets[1].run(lambda: function(setup, *args, **more))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_with_offload_the_last_pass_brings_gradients_to_the_host(runs: Runs, stage: int) -> None:
    setup = evolve(runs.setup("deepspeed", "qwen3"), options={"stage": stage, "offload": "optimizer"})
    for of_the_step, before_it in on_one_rank(runs, ranks.norms_before_stepping, setup):
        assert before_it == pytest.approx(of_the_step, rel=GRAD_NORM.relative)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("skip", SKIPS, ids=str)
@pytest.mark.parametrize("options", SUMS, ids=str)
def test_a_layer_that_some_micro_batch_skips_trains_as_plain(
    runs: Runs, options: Mapping[str, Any], skip: Skip, apart: bool
) -> None:
    setup = runs.setup("deepspeed", "qwen3")
    found = on_one_rank(runs, ranks.train_and_skip, evolve(setup, options=options), skip, apart=apart)
    wanted = on_one_rank(runs, ranks.train_and_skip, evolve(setup, backend="plain"), skip)
    assert found == [pytest.approx(each, rel=GRAD_NORM.relative) for each in wanted]


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("skip", SKIPS, ids=str)
@pytest.mark.parametrize("options", KEEPS, ids=str)
def test_it_is_refused_where_deepspeed_keeps_gradients(
    runs: Runs, options: Mapping[str, Any], skip: Skip, apart: bool
) -> None:
    setup = evolve(runs.setup("deepspeed", "qwen3"), options=options)
    with pytest.raises(Unsupported, match=r"^model\.layers\.1\.\S+ got no gradient in this micro-batch, but had one"):
        on_one_rank(runs, ranks.train_and_skip, setup, skip, apart=apart)


@pytest.mark.parametrize("options", KEEPS, ids=str)
def test_deepspeed_would_apply_the_step_before_again(runs: Runs, options: Mapping[str, Any]) -> None:
    # When this fails DeepSpeed clears what it keeps, and GradientWatch can go.
    setup, skip = runs.setup("deepspeed", "qwen3"), Skip(step=1, micro_batches=tuple(range(9)))
    found = on_one_rank(runs, ranks.train_and_skip, evolve(setup, options=options), skip, watched=False)
    wanted = on_one_rank(runs, ranks.train_and_skip, evolve(setup, options=SUMS[1]), skip)
    same = [each == pytest.approx(other, rel=GRAD_NORM.relative) for each, other in zip(found, wanted, strict=True)]
    assert (same[0], same[2]) == (True, False)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_would_keep_the_gradients_of_a_skipped_step(runs: Runs, stage: int) -> None:
    # When this fails DeepSpeed drops them, and state.drop_skipped_gradients can go.
    half = in_bfloat16(runs, {"stage": stage, "offload": "optimizer"})
    assert on_one_rank(runs, ranks.skip_and_keep, half) == float("inf")
