"""Checkpoints between stages and backends: the run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

from corerl_testing import Runs
from tests.checkpoint.moves import Place, assert_moving_follows_staying

ZERO1 = ("deepspeed", {"stage": 1}, 2)
ZERO2 = ("deepspeed", {"stage": 2}, 1)
ZERO3 = ("deepspeed", {"stage": 3}, 2)
FSDP = ("fsdp", {}, 2)


def test_a_run_that_moves_often_follows_one_that_stays(runs: Runs, tmp_path: Path) -> None:
    places: list[Place] = [ZERO1, ZERO3, FSDP, ZERO2]
    assert_moving_follows_staying(runs, tmp_path, "qwen3-moe", places)
