"""The contract's checks in layouts that the conformance suite does not take by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.types import MemoryKind
from corerl_testing import DEEP, RankPool, Runs, Subject
from corerl_testing.suite import CHECKS
from plugins.megatron.tests import ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "cp2": {"context_parallel": 2},
    "ep2": {"expert_parallel": 2},
    "dp2 overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket": 4096},
}
OF_ANY_LAYOUT = [
    "test_init_tells_where_training_stands_and_loads_the_models_weights_to_the_last_bit",
    "test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_next_one_trains",
    "test_a_step_of_which_one_call_is_not_finite_is_skipped_and_leaves_nothing_to_the_next",
    "test_outputs_of_training_passes_are_those_of_forward",
    "test_snapshots_answer_for_the_weights_they_were_made_of_and_leave_the_current_ones_alone",
    "test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit",
    "test_an_update_delivers_every_tensor_once_and_bit_for_bit",
    "test_sleep_frees_what_it_says_and_waking_restores_every_bit",
]


def arguments_of(check: str) -> list[str]:
    code = CHECKS[check].__code__
    return list(code.co_varnames[1 : code.co_argcount])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "check"),
    # Experts can be spread in a model of experts alone, which is a matter of what kind of model a check takes.
    [
        (layout, check)
        for layout in LAYOUTS
        for check in OF_ANY_LAYOUT
        if layout != "ep2" or "kind" in arguments_of(check)
    ],
)
def test_a_layout_keeps_the_contract(runs: Runs, tmp_path: Path, layout: str, check: str) -> None:
    kind = "qwen3-moe" if layout == "ep2" else "qwen3-tied"
    if layout == "pp2 vpp2":  # stages in turns want two layers each
        deeper = {each: runs.models[f"{each}{DEEP}"] for each in ("qwen3", "qwen3-tied")}
        kind, runs = f"{kind}{DEEP}", runs.beside({}, deeper)
    subject = Subject(
        backend="megatron", world_size=2, runs=runs, directory=tmp_path / "checkpoints", options=LAYOUTS[layout]
    )
    arguments = {
        "tmp_path": tmp_path,
        "kind": kind,
        "down": list(MemoryKind),
        "up": list(MemoryKind),
    }
    CHECKS[check](subject, **{name: arguments[name] for name in arguments_of(check)})


def test_a_rank_without_memory_says_what_it_holds_without_the_others(runs: Runs, rank_pool: RankPool) -> None:
    setup = evolve(runs.setup("megatron", "qwen3"), options=LAYOUTS["dp2 overlap"])
    told, norms = zip(*rank_pool.run(ranks.explained_alone, setup, 1), strict=True)
    assert told[0] == "" and "1 MiB is free; in use: tensors of param: " in told[1]
    assert norms == tuple(each for _, each in rank_pool.run(ranks.explained_alone, setup, -1))


def test_the_vocabularys_padding_stays_zero(runs: Runs, rank_pool: RankPool) -> None:
    setup = evolve(runs.setup("megatron", "qwen3"), options={"tensor_parallel": 2})
    first, second = rank_pool.run(ranks.padding_after_steps, setup, 3)
    assert first == []
    assert second == [(1, 0.0), (1, 0.0)]  # of embedding and head: 97 tokens on two ranks
