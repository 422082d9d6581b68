"""Checkpoints between stages and backends: the run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.testing.subject import Runs
from tests.checkpoint.moves import Place, assert_moving_follows_staying

ZERO1 = ("deepspeed", {"stage": 1}, 2)
ZERO2 = ("deepspeed", {"stage": 2}, 1)
ZERO3 = ("deepspeed", {"stage": 3}, 2)
FSDP = ("fsdp", {}, 2)
TP2 = ("megatron", {"tensor_parallel": 2}, 2)
PLAIN = ("plain", {}, 1)


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("qwen3-tied", [FSDP, ZERO3, TP2, PLAIN]),
        ("qwen3-moe", [ZERO1, ZERO3, FSDP, ZERO2]),
    ],
    ids=["fsdp zero3 tp2 plain", "zero1 zero3 fsdp zero2 of one rank"],
)
def test_a_run_that_moves_every_two_steps_follows_one_that_stays(
    runs: Runs, tmp_path: Path, kind: str, places: list[Place]
) -> None:
    assert_moving_follows_staying(runs, tmp_path, kind, places)
