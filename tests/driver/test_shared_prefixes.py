"""A run whose prompts are computed once, against the same run without: in one process, on the plain backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import execute_here, small


def metrics_of(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    directory.mkdir()
    execute_here(small(directory, "run.steps=2", *overrides))
    lines = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step" in line]


def test_a_run_that_computes_prompts_once_goes_as_without(tmp_path: Path) -> None:
    apart = metrics_of(tmp_path / "apart")
    once = metrics_of(tmp_path / "once", "train.share_prefixes=true")
    assert len(once) == len(apart) == 2
    saved = "train/prefixes/saved"
    for found, wanted in zip(once, apart, strict=True):
        assert found["rollout/reward"] == wanted["rollout/reward"]
        for name in ("train/loss", "train/grad_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)
        assert found["train/tokens"] == pytest.approx(wanted["train/tokens"] * (1 - found[saved]))
        assert found[saved] > 0.1
        assert found.keys() - wanted.keys() == {saved}
