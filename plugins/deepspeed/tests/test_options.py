"""Stages, offload and the other options: each keeps the contract, and changes no number beyond rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.checkpoint import begin
from corerl.testing import (
    BFLOAT16_GRAD_NORM,
    BFLOAT16_LOSS,
    Checkpoint,
    RankPool,
    Runs,
    Subject,
    assert_follows,
    different,
    mean_apart,
    suite,
)
from corerl.types import MemoryKind

STEPS = range(4)

# Names of checks in the suite, which runs through each stage as it is.
SKIP = "test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_next_one_trains"
SNAPSHOTS = "test_snapshots_answer_for_the_weights_they_were_made_of_and_leave_the_current_ones_alone"
RESUME = "test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit"
UPDATE = "test_an_update_delivers_every_tensor_once_and_bit_for_bit"
CALLS = "test_the_gradients_of_several_calls_are_those_of_one"
SKIP_CALLS = "test_a_step_of_which_one_call_is_not_finite_is_skipped_and_leaves_nothing_to_the_next"
SCALE = "test_a_steps_scale_multiplies_its_gradients_before_they_are_clipped"
PASSES = "test_passes_and_weight_updates_between_the_calls_leave_gradients_alone"
NAPS = "test_all_but_gradients_may_sleep_between_the_calls"
SLEEP = "test_sleep_frees_what_it_says_and_waking_restores_every_bit"
ARGUMENTS: dict[str, Any] = {"kind": "qwen3-tied", "down": list(MemoryKind), "up": list(MemoryKind), "announced": False}

# What options can change: where masters and moments are, where weights are, or the order of sums alone.
OF_THE_OPTIMIZER = [SKIP, RESUME, SLEEP, CALLS, SKIP_CALLS, SCALE, NAPS]
OF_WEIGHTS = [SNAPSHOTS, RESUME, UPDATE, SLEEP, PASSES, NAPS]
OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"stage": 1, "offload": "optimizer"}, OF_THE_OPTIMIZER),
    ({"stage": 2, "offload": "optimizer"}, OF_THE_OPTIMIZER),
    ({"stage": 3, "offload": "optimizer"}, OF_THE_OPTIMIZER),
    ({"stage": 3, "offload": "parameters"}, OF_WEIGHTS),
    ({"stage": 3, "node_shard_size": 2}, OF_WEIGHTS),
    ({"stage": 3, "raw": {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}}, OF_WEIGHTS),
    ({"stage": 3, "reduce_bucket": 5000, "gather_bucket": 5000}, []),
    ({"stage": 2, "reduce_bucket": 5000, "gather_bucket": 5000}, []),
]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (options, kind)
        for options, checks in OPTIONS
        for kind in (["qwen3-tied"] if checks is OF_THE_OPTIMIZER else ["qwen3-tied", "qwen3-moe"])
    ],
    ids=str,
)
def test_with_options_a_run_follows_the_plain_backend(runs: Runs, kind: str, options: Mapping[str, Any]) -> None:
    found = runs.train(2, evolve(runs.setup("deepspeed", kind), options=options), STEPS)
    assert_follows(found, runs.trained_as(1, runs.setup("plain", kind), len(STEPS)))


@pytest.mark.parametrize(
    ("options", "check"), [(options, check) for options, checks in OPTIONS for check in checks], ids=str
)
def test_a_backend_with_options_keeps_the_contract(
    runs: Runs, tmp_path: Path, options: Mapping[str, Any], check: str
) -> None:
    function = suite.CHECKS[check]
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    given = {name: tmp_path if name == "tmp_path" else ARGUMENTS[name] for name in names}
    function(
        Subject(backend="deepspeed", world_size=2, runs=runs, directory=tmp_path / "checkpoints", options=options),
        **given,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "offload": "optimizer"},
        {"stage": 3, "offload": "parameters"},
        {"stage": 3, "node_shard_size": 2},
    ],
    ids=str,
)
def test_bfloat16_stays_near_float32_and_resumes_to_the_last_bit(
    runs: Runs, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    setup, checkpoint = (
        evolve(runs.setup("deepspeed", "qwen3-tied"), options=options),
        Checkpoint(begin(tmp_path, 5), 2),
    )
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    found = runs.train(2, half, range(10), save_after=4, save_to=checkpoint.role)
    wanted = runs.trained_as(1, runs.setup("plain", "qwen3-tied"), 10)
    assert 0 < mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
    assert 0 < mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
    resumed = runs.train(2, half, range(5, 10), resume=checkpoint.complete())
    assert (resumed.losses, different(resumed.state, found.state)) == (found.losses[5:], [])


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def test_two_nodes_of_two_ranks_train_save_and_resume(runs: Runs, four_ranks: RankPool, tmp_path: Path) -> None:
    on_four = runs.beside({4: four_ranks})
    setup, checkpoint = runs.setup("deepspeed", "qwen3-moe"), Checkpoint(begin(tmp_path, 2), 4)
    in_nodes = evolve(setup, options={"node_shard_size": 2})
    found = on_four.train(4, in_nodes, STEPS, save_after=1, save_to=checkpoint.role)
    assert_follows(found, runs.trained_as(1, evolve(setup, backend="plain"), len(STEPS)))
    resumed = on_four.train(4, in_nodes, STEPS[2:], resume=checkpoint.complete())
    assert (resumed.losses, different(resumed.state, found.state)) == (found.losses[2:], [])
