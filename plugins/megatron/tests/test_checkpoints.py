"""Checkpoints between layouts and backends: the run goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.checkpoint.commit import begin
from corerl.testing.compare import Tensors, assert_follows, different, whole
from corerl.testing.subject import Checkpoint, Runs
from plugins.megatron.tests.ranks import native_then_portable

TP2 = ("megatron", {"tensor_parallel": 2}, 2)
PP2 = ("megatron", {"pipeline_parallel": 2}, 2)
VPP2 = ("megatron", {"pipeline_parallel": 2, "virtual_pipeline": 2, "distributed_optimizer": False}, 2)
DP2 = ("megatron", {}, 2)
CP2 = ("megatron", {"context_parallel": 2}, 2)
FSDP = ("fsdp", {}, 2)
PLAIN = ("plain", {}, 1)
EP2 = ("megatron", {"expert_parallel": 2}, 2)
EP1 = ("megatron", {}, 1)

Place = tuple[str, Mapping[str, Any], int]


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("qwen3-tied", [TP2, PP2, FSDP, TP2]),
        ("qwen3", [DP2, VPP2, PLAIN, CP2]),
        ("qwen3-moe", [EP2, EP1, FSDP, EP2]),
    ],
    ids=["tp2 pp2 fsdp tp2", "dp2 vpp2 plain cp2", "ep2 ep1 fsdp ep2"],
)
def test_a_run_that_moves_every_two_steps_follows_one_that_stays(
    runs: Runs, tmp_path: Path, kind: str, places: list[Place]
) -> None:
    stays = runs.train(1, runs.setup("plain", kind), range(2 * len(places)))
    resume, losses, grad_norms = "", list[float](), list[float]()
    saved: Mapping[str, Tensors] = {}
    for number, (backend, options, ranks) in enumerate(places):
        first = 2 * number
        checkpoint = Checkpoint(begin(tmp_path, first + 2), ranks)
        setup = evolve(runs.setup(backend, kind), options=options)
        saving = {"save_after": first + 1, "save_to": checkpoint.role}
        found = runs.train(ranks, setup, range(first, first + 2), resume=resume, **saving)
        assert (found.optimizer_step, found.adam_step) == (first, first + 2)
        assert not resume or different(found.at_start, saved) == []
        saved, resume = found.state, checkpoint.complete()
        losses += found.losses
        grad_norms += found.grad_norms
    assert_follows(evolve(found, losses=losses, grad_norms=grad_norms), stays)


@pytest.mark.parametrize(
    ("kind", "saved", "read"),
    [("qwen3-tied", TP2, PP2), ("qwen3", PP2, DP2), ("qwen3", VPP2, VPP2), ("qwen3-moe", EP2, EP2)],
    ids=["tp2 to pp2", "pp2 to dp2", "vpp2, whole optimizer", "ep2"],
)
def test_megatrons_own_checkpoint_holds_what_ours_does(
    runs: Runs, tmp_path: Path, kind: str, saved: Place, read: Place
) -> None:
    backend, options, ranks = saved
    checkpoint = Checkpoint(begin(tmp_path, 2), ranks)
    setup = evolve(runs.setup(backend, kind), options={**options, "native_checkpoint": True})
    runs.train(ranks, setup, range(2), save_after=1, save_to=checkpoint.role)
    backend, options, ranks = read
    both = runs.rank_sets[ranks].run(
        native_then_portable, evolve(runs.setup(backend, kind), options=options), checkpoint.complete()
    )
    native, portable = (whole(states) for states in zip(*both, strict=True))
    assert different(native, portable) == []
