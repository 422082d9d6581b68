"""A pretrained model on two tasks, which a config of 25 lines names."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.config import load_config
from tests.end_to_end.command import metrics
from tests.in_process import execute_here
from tests.machine import wait_for_memory
from tests.smollm2 import EXAMPLES, NEEDED, RUN, lines_of, needs_smollm2

CONFIG = EXAMPLES / "reasoning_gym.toml"


def test_the_config_has_at_most_25_lines() -> None:
    assert len(lines_of(CONFIG)) <= 25


@needs_smollm2
@pytest.mark.nightly
@pytest.mark.processes
def test_smollm2_is_trained_on_two_tasks(tmp_path: Path) -> None:
    """A few steps are too few for a mean of eight questions to rise for certain: docs/environments.md has a run's."""
    wait_for_memory(NEEDED, "a run of SmolLM2")
    own = [f"run.dir={tmp_path}/run", "run.steps=3", "data.held_out=0"]
    assert execute_here(load_config(CONFIG, [*RUN, *own])).steps_done == 3
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert all(line["train/grad_norm"] > 0.0 for line in steps)
    assert {"reward/gcd", "reward/products"} <= {name for line in steps for name in line}
