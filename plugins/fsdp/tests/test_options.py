"""Options change memory, transfers and speed, and no number beyond rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config import ClusterInfo, TrainConfig
from corerl.kinds import MemoryKind, ModelSize
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.memory import memory
from corerl_fsdp.spec import check
from corerl_testing import (
    BFLOAT16_GRAD_NORM,
    BFLOAT16_LOSS,
    PACKINGS,
    RankPool,
    Runs,
    Setup,
    assert_follows,
    different,
    mean_apart,
    weights_apart,
)
from plugins.fsdp.tests import ranks

STEPS = range(2)


def with_options(setup: Setup, options: Mapping[str, Any], **train_fields: Any) -> Setup:
    return evolve(setup, options=options, train=evolve(setup.train, **train_fields))


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "train_fields"),
    [
        ({}, {"recompute": "full"}),
        ({"offload": "optimizer"}, {}),
        ({"offload": "parameters"}, {}),
        ({"reshard_after_forward": True}, {}),
    ],
    ids=str,
)
def test_where_only_memory_changes_no_bit_of_a_run_does(
    runs: Runs, options: Mapping[str, Any], train_fields: Mapping[str, Any]
) -> None:
    plain = runs.setup("fsdp", "qwen3-moe")
    found = runs.train(2, with_options(plain, options, **train_fields), STEPS)
    wanted = runs.trained_as(2, plain, len(STEPS))
    assert (found.losses, found.grad_norms) == (wanted.losses, wanted.grad_norms)
    assert different(found.state, wanted.state) == []


def test_a_run_with_reordered_sums_follows_the_plain_backend(runs: Runs) -> None:
    """Besides the variants of the spec, with which the conformance suite trains."""
    options = {"sync": "last", "offload": "parameters"}
    found = runs.train(2, with_options(runs.setup("fsdp", "qwen3-moe"), options), STEPS)
    assert_follows(found, runs.trained_as(1, runs.setup("plain", "qwen3-moe"), len(STEPS)))


# ---- what they save --------------------------------------------------------------------------------------------------


def test_with_recomputed_layers_few_activations_are_kept(runs: Runs, rank_pool: RankPool) -> None:
    setup = runs.setup("fsdp", "qwen3-deep", PACKINGS["one by one"])
    kept = rank_pool.run(ranks.saved_for_backward, setup)
    fewer = rank_pool.run(ranks.saved_for_backward, with_options(setup, {}, recompute="full"))
    for few, many in zip(fewer, kept, strict=True):
        assert 0 < 4 * few < many


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"gather": "last", "reduce_scatter": "each"}),
        ({"reshard_after_forward": True}, {"gather": "each pass", "reduce_scatter": "each"}),
        ({"sync": "last"}, {"gather": "last", "reduce_scatter": "last"}),
        ({"shard_size": 1}, {"allreduce": "last"}),  # a shard on one rank is whole: nothing to scatter
    ],
    ids=str,
)
def test_gradients_travel_as_often_as_the_option_says(
    runs: Runs, rank_pool: RankPool, options: Mapping[str, Any], expected: Mapping[str, str]
) -> None:
    setup = with_options(runs.setup("fsdp", "qwen3"), options)
    for units, micro_batches, counts in rank_pool.run(ranks.collectives_of_a_step, setup):
        assert micro_batches > 1
        each = {"last": units, "each": units * micro_batches}
        each["each pass"] = (2 * units - 1) * micro_batches  # but the root stays gathered for its backward pass
        times = {operation: each[when] for operation, when in expected.items()}
        # Of the norm, and with replicas, which of theirs all take.
        times["allreduce"] = times.get("allreduce", 0) + (2 if "shard_size" in options else 1)
        names = {"gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_", "allreduce": "allreduce_"}
        assert {operation: counts[name] for operation, name in names.items()} == {
            "gather": 0,
            "reduce_scatter": 0,
            **times,
        }


@pytest.mark.parametrize(
    ("options", "ranks", "streamed", "gathered", "gradients"),
    [
        ({}, 2, False, 100 + 20 + 30 + 1, (100 + 20 + 30 + 1 + 1) // 2),
        ({"reshard_after_forward": True, "sync": "last"}, 2, False, 30 + 1 + 2 * 60, 151),
        ({"sync": "last"}, 2, True, 151, 151 + 76),  # what earlier calls have left is sharded
        ({}, 1, True, 151, 151),
        ({"shard_size": 1}, 2, True, 151, 151 + 151),
        ({"shard_size": 2}, 4, True, 151, 76 + 76),
    ],
)
def test_a_forecast_counts_what_is_gathered_and_added_up(
    options: Mapping[str, Any], ranks: int, streamed: bool, gathered: int, gradients: int
) -> None:
    size = ModelSize(layers=(40, 60), experts=(0, 0), embedding=20, head=30, rest=1, hidden=2)
    cluster = ClusterInfo(device="cuda", ranks=ranks, train=TrainConfig(precision="bfloat16"), streamed=streamed)
    found = memory(FsdpConfig(**options), cluster, size)
    assert (found.gathered, found.kinds[MemoryKind.GRAD]) == (2 * gathered, 4 * gradients)


# ---- float16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_float16_stays_near_float32(runs: Runs, recompute: str) -> None:
    setup, steps = runs.setup("fsdp", "qwen3-tied"), range(5)  # the next one overflows at the first scale
    found = runs.train(2, with_options(setup, {}, precision="float16", recompute=recompute), steps)
    wanted = runs.trained_as(2, setup, len(steps))
    assert 0 < mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
    assert 0 < mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
    assert 0 < weights_apart(found.state["master"], wanted.state["master"]) < BFLOAT16_LOSS


def test_an_overflow_is_skipped_everywhere_and_a_checkpoint_remembers_it(
    runs: Runs, rank_pool: RankPool, tmp_path: Path
) -> None:
    setup = with_options(runs.setup("fsdp", "qwen3"), {}, precision="float16")
    at_once, resumed = (
        rank_pool.run(ranks.overflow_and_go_on, setup, str(tmp_path / "actor"), resume) for resume in (False, True)
    )
    for results in at_once:
        assert [result.applied for result in results] == [True, False, True, True]
        scales = [result.metrics["loss_scale"].total for result in results]
        assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    for results, after_resume in zip(at_once, resumed, strict=True):
        assert after_resume[2:] == results[2:]
    (on_one_rank,) = runs.rank_sets[1].run(ranks.step_of_a_resumed_run, setup, str(tmp_path / "actor"), 2)
    assert (on_one_rank.applied, on_one_rank.metrics["loss_scale"].total) == (True, 2.0**15)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_ranks_that_do_not_make_whole_groups_are_refused() -> None:
    (problem,) = check(FsdpConfig(shard_size=4), ClusterInfo(device="cpu", ranks=6))
    assert problem.path == "shard_size" and problem.text.startswith("4 does not divide the role's 6 ranks; use a divi")
    for size in (0, 1, 2, 3, 6):
        assert list(check(FsdpConfig(shard_size=size), ClusterInfo(device="cpu", ranks=6))) == []
