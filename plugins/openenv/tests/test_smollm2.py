"""A pretrained model in the environment that `openenv init echo_env` writes, by a config of 25 lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from corerl.config import load_config
from tests.end_to_end.command import metrics
from tests.in_process import execute_here
from tests.machine import wait_for_memory
from tests.smollm2 import EXAMPLES, NEEDED, RUN, lines_of, needs_smollm2

CONFIG = EXAMPLES / "echo.toml"


def test_the_config_has_at_most_25_lines() -> None:
    assert len(lines_of(CONFIG)) <= 25


@needs_smollm2
@pytest.mark.nightly
@pytest.mark.processes
def test_smollm2_learns_what_the_echo_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth for each character, up to ten."""
    site = tmp_path / "environments"
    site.mkdir()
    written = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(site)]
    assert subprocess.run(written, stdout=subprocess.DEVNULL).returncode == 0
    monkeypatch.syspath_prepend(site)
    wait_for_memory(NEEDED, "a run of SmolLM2")
    own = [f"run.dir={tmp_path}/run", "run.steps=6"]
    assert execute_here(load_config(CONFIG, [*RUN, *own])).steps_done == 6
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(shown) == 6 * 16
    for each in shown:
        assert each["reward"] == pytest.approx(min(len(each["response"].strip()) / 10, 1.0))
    rewards = [line["rollout/reward"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert sum(rewards[-3:]) > sum(rewards[:3])
