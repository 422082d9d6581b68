"""A pretrained model in an environment of verifiers from a package index, marble-v1, by a config of 25 lines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from corerl.config import load_config
from corerl_verifiers.environment import load, tasks_of
from corerl_verifiers.spec import VerifiersConfig
from tests.end_to_end.command import metrics
from tests.in_process import HERE, execute_here
from tests.machine import wait_for_memory
from tests.smollm2 import EVERY_SAMPLE, EXAMPLES, MODEL, NEEDED, lines_of, needs_smollm2

CONFIG = EXAMPLES / "marble.toml"
needs_marble = pytest.mark.skipif(importlib.util.find_spec("marble_v1") is None, reason="`make test-verifiers` has it")


def test_the_config_has_at_most_25_lines() -> None:
    assert len(lines_of(CONFIG)) <= 25


def options(**args: Any) -> VerifiersConfig:
    return VerifiersConfig(environment="marble-v1", tasks=4, args=args)


@needs_marble
def test_weights_of_a_tasks_rewards_are_settings() -> None:
    given = load_config(CONFIG).samplers["verifiers"]["args"]
    (task, *_) = tasks_of(load(options(**given)), options(**given)).values()
    weights = {function.__name__: function._vf_weight for function in task.hooks("reward")}
    assert weights == {"scored": 1.0, "answered_legally": 1.0, "closeness": 0.0}


@needs_marble
@needs_smollm2
@pytest.mark.nightly
@pytest.mark.processes
def test_smollm2_is_trained_on_what_the_marble_does(tmp_path: Path) -> None:
    from marble_v1.taskset import parse_layout

    wait_for_memory(NEEDED, "a run of SmolLM2")
    own = [f"model.path={MODEL}", f"run.dir={tmp_path}/run", "run.steps=1"]
    assert execute_here(load_config(CONFIG, [*HERE, *own, EVERY_SAMPLE])).steps_done == 1
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(shown) == 4
    for each in shown:
        assert "A marble rolls off a fixed ramp" in each["prompt"]
        if parse_layout(each["response"]) is None:
            assert each["reward"] == 0.0
    (line,) = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert {"reward/scored", "reward/answered_legally", "reward/closeness"} <= line.keys()
