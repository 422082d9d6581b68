"""The tutorial's engine runs as the tutorial says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.command import Command

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


def test_the_tutorials_engine_trains_two_steps(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "engine", tmp_path, dirs_exist_ok=True)
    with Command("train", "run.toml", "cluster.offload=always", logs=tmp_path, directory=tmp_path) as command:
        assert command.finish() == 0, command.err
    lines = (tmp_path / "runs/my-engine/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "rollout/logprob_diff" in line]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["rollout/logprob_diff"] < 1e-4 for step in steps)
    assert all(math.isfinite(step["train/loss"]) and step["train/grad_norm"] > 0 for step in steps)
