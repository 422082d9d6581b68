"""Checkpoints between layouts and backends: the run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.checkpoint import begin
from corerl_testing import Checkpoint, Runs, different, whole
from plugins.megatron.tests.ranks import (
    groups_left_by_a_failed_save,
    native_save_on_a_full_disk,
    native_then_portable,
    saves_that_one_rank_fails,
    weights_left,
)
from tests.checkpoint.moves import Place, assert_moving_follows_staying

TP2 = ("megatron", {"tensor_parallel": 2}, 2)
PP2 = ("megatron", {"pipeline_parallel": 2}, 2)
VPP2 = ("megatron", {"pipeline_parallel": 2, "virtual_pipeline": 2, "distributed_optimizer": False}, 2)
DP2 = ("megatron", {}, 2)
CP2 = ("megatron", {"context_parallel": 2}, 2)
FSDP = ("fsdp", {}, 2)
PLAIN = ("plain", {}, 1)
EP2 = ("megatron", {"expert_parallel": 2}, 2)
EP1 = ("megatron", {}, 1)


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("qwen3-tied", [TP2, PP2, FSDP, TP2]),
        ("qwen3-deep", [DP2, VPP2, PLAIN, CP2]),
        ("qwen3-moe", [EP2, EP1, FSDP, EP2]),
    ],
    ids=["tp2 pp2 fsdp tp2", "dp2 vpp2 plain cp2", "ep2 ep1 fsdp ep2"],
)
def test_a_run_that_moves_often_follows_one_that_stays(
    runs: Runs, tmp_path: Path, kind: str, places: list[Place]
) -> None:
    assert_moving_follows_staying(runs, tmp_path, kind, places)


@pytest.mark.parametrize(
    ("kind", "saved", "read", "critic"),
    [
        ("qwen3-tied", TP2, PP2, False),
        ("qwen3", PP2, DP2, False),
        ("qwen3-deep", VPP2, VPP2, False),
        ("glm4-moe", EP2, EP2, False),
        ("qwen3-tied", PP2, TP2, True),
    ],
    ids=["tp2 to pp2", "pp2 to dp2", "vpp2, whole optimizer", "ep2, weights in buffers", "a critic"],
)
def test_megatrons_own_checkpoint_holds_what_ours_does(
    runs: Runs, tmp_path: Path, kind: str, saved: Place, read: Place, critic: bool
) -> None:
    backend, options, ranks = saved
    checkpoint = Checkpoint(begin(tmp_path, 2), ranks)
    setup = evolve(runs.setup(backend, kind), options={**options, "native_checkpoint": True}, value_head=critic)
    runs.train(ranks, setup, range(2), save_after=1, save_to=checkpoint.role)
    backend, options, ranks = read
    reading = evolve(runs.setup(backend, kind), options=options, value_head=critic)
    both = runs.rank_sets[ranks].run(native_then_portable, reading, checkpoint.complete())
    native, portable = (whole(states) for states in zip(*both, strict=True))
    assert different(native, portable, list(portable)) == []


def test_megatrons_checkpoint_on_a_full_disk_fails_in_one_line(runs: Runs, tmp_path: Path) -> None:
    backend, options, ranks = TP2
    setup = evolve(runs.setup(backend, "qwen3-tied"), options=options)
    said = runs.rank_sets[ranks].run(native_save_on_a_full_disk, setup, str(tmp_path / "own"))
    for line in said:
        assert line.startswith(f"cannot write {tmp_path / 'own'}: ")
        assert "No space left on device" in line
        assert "\n" not in line


@pytest.mark.parametrize("alone", [0, 1])
def test_no_rank_waits_to_save_for_one_that_failed(runs: Runs, tmp_path: Path, alone: int) -> None:
    setup = evolve(runs.setup("megatron", "qwen3-tied"), options={"native_checkpoint": True})
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "megatron").touch()  # where the first rank is to make a directory
    reports = runs.rank_sets[2].run(saves_that_one_rank_fails, setup, str(tmp_path), alone)
    for rank, (part, directory, well) in enumerate(reports):
        assert part.startswith(f"SaveFailed: actor rank {rank}: save at optimizer step 1: ")
        assert part.endswith("full" if rank == alone else f" rank {alone} failed: full")
        assert directory.startswith("SaveFailed: ") and f"cannot write {tmp_path / '1' / 'megatron'}: " in directory
        assert well == ""


def test_ranks_leave_no_groups_where_the_last_save_has_failed(runs: Runs) -> None:
    for said, initialized, made in runs.rank_sets[2].run(groups_left_by_a_failed_save, runs.setup("megatron", "qwen3")):
        assert "full" in said
        assert (initialized, made) == (False, 0)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_ranks_that_have_shut_down_hold_no_weights(runs: Runs, kind: str) -> None:
    assert runs.rank_sets[2].run(weights_left, runs.setup("megatron", kind)) == [0, 0]
