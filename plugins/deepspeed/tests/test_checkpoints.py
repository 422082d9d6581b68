"""Checkpoints between stages and backends: the run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.checkpoint import begin
from corerl_testing import Checkpoint, Runs, different, whole
from plugins.deepspeed.tests.ranks import (
    native_save_on_a_full_disk,
    native_then_portable,
    save_what_is_broken_on_rank_0,
)
from tests.checkpoint.moves import Place, assert_moving_follows_staying

ZERO1 = ("deepspeed", {"stage": 1}, 2)
ZERO2 = ("deepspeed", {"stage": 2}, 1)
ZERO3 = ("deepspeed", {"stage": 3}, 2)
FSDP = ("fsdp", {}, 2)


def test_a_run_that_moves_every_two_steps_follows_one_that_stays(runs: Runs, tmp_path: Path) -> None:
    places: list[Place] = [ZERO1, ZERO3, FSDP, ZERO2]
    assert_moving_follows_staying(runs, tmp_path, "qwen3-moe", places)


@pytest.mark.parametrize(
    ("kind", "place"), [("qwen3", ZERO1), ("qwen3-moe", ZERO2), ("qwen3-tied", ZERO3)], ids=["zero1", "zero2", "zero3"]
)
def test_deepspeeds_own_checkpoint_holds_what_ours_does(runs: Runs, tmp_path: Path, kind: str, place: Place) -> None:
    backend, options, ranks = place
    checkpoint = Checkpoint(begin(tmp_path, 2), ranks)
    setup = evolve(runs.setup(backend, kind), options=options)
    writing = evolve(setup, options={**options, "native_checkpoint": True})
    runs.train(ranks, writing, range(2), save_after=1, save_to=checkpoint.role)
    both = runs.rank_sets[ranks].run(native_then_portable, setup, checkpoint.complete())
    native, portable = (whole(states) for states in zip(*both, strict=True))
    assert different(native, portable) == []


@pytest.mark.parametrize("full", [0, 1])
def test_deepspeeds_own_checkpoint_on_a_full_disk_is_a_failed_save_on_all_ranks(
    runs: Runs, tmp_path: Path, full: int
) -> None:
    backend, options, ranks = ZERO3
    setup = evolve(runs.setup(backend, "qwen3-tied"), options=options)
    said = runs.rank_sets[ranks].run(native_save_on_a_full_disk, setup, str(tmp_path / "own"), full)
    assert said == [f"cannot write {tmp_path / 'own'}: rank {full}: file write failed (No space left)"] * 2


def test_no_rank_waits_in_deepspeeds_own_checkpoint_for_one_that_cannot_save(runs: Runs, tmp_path: Path) -> None:
    backend, options, ranks = ZERO3
    setup = evolve(runs.setup(backend, "qwen3-tied"), options={**options, "native_checkpoint": True})
    broken, sound = runs.rank_sets[ranks].run(save_what_is_broken_on_rank_0, setup, str(tmp_path))
    assert broken.startswith("SaveFailed: actor rank 0: save at optimizer step 0: 'exp_avg' of 'model.embed_tokens")
    assert sound == ""
