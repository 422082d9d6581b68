"""An environment of verifiers from a package index, marble-v1, and SmolLM2 in it by a config of 25 lines."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from corerl.config import load_config, structure
from corerl.data import Prompt
from corerl.rollout import Judged, start_user_coroutine
from corerl_agents.script import scripted
from corerl_verifiers.environment import load, rows, tasks_of
from corerl_verifiers.sampler import Play, Serving
from corerl_verifiers.spec import VerifiersConfig
from tests.end_to_end.command import metrics
from tests.machine import paced, wait_for_memory
from tests.smollm2 import EXAMPLES, MODEL, NEEDED, lines_of, needs_smollm2

CONFIG = EXAMPLES / "marble.toml"
needs_marble = pytest.mark.skipif(importlib.util.find_spec("marble_v1") is None, reason="`make test-verifiers` has it")


def test_the_config_has_at_most_25_lines() -> None:
    assert len(lines_of(CONFIG)) <= 25


@needs_marble
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kept", "reward", "parts"),
    [
        (1, 2.0, {"scored": 1.0, "answered_legally": 1.0, "closeness": 0.0}),
        (0, 0.0, {"scored": 0.0, "answered_legally": 0.0, "closeness": 0.0}),
    ],
)
def test_the_weights_of_its_rewards_are_settings(kept: int, reward: float, parts: dict[str, float]) -> None:
    """The solution that a level was made with, and a layout without a piece."""
    options = structure({**load_config(CONFIG).samplers["verifiers"], "tasks": 1}, VerifiersConfig)
    env, (row,) = load(options), rows(options)
    tasks = tasks_of(env, options)
    answer = json.dumps(tasks[row["task"]].data.solution[:kept])
    function = Play(name="marble-v1", env=env, tasks=tasks, serving=(serving := Serving(env)))
    with scripted(Prompt(index=0, text=row["prompt"], answer="", fields=row), [answer]) as script:
        outcome = asyncio.run(asyncio.wait_for(function.play(script.episode), paced(120)))
    start_user_coroutine(serving.end()).result(paced(30))
    assert outcome == Judged(reward=reward, parts=parts)


@needs_marble
@needs_smollm2
@pytest.mark.nightly
@pytest.mark.processes
def test_smollm2_is_trained_on_what_the_marble_does(tmp_path: Path) -> None:
    """The config as it is, but for its number of steps: a minute each."""
    from marble_v1.taskset import parse_layout

    wait_for_memory(NEEDED, "a run of SmolLM2")
    own = [f"run.dir={tmp_path}/run", f"model.path={MODEL}", "run.steps=4", "checkpoint.export=false"]
    extensions = 'extensions=[{name="jsonl",options={samples="all"}}]'
    command = [Path(sys.executable).with_name("corerl"), "train", CONFIG, *own, extensions]
    subprocess.run(command, check=True, timeout=paced(1200))
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(shown) == 4 * 16
    for each in shown:
        assert "A marble rolls off a fixed ramp" in each["prompt"]
        if parse_layout(each["response"]) is None:
            assert each["reward"] == 0.0
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(steps) == 4
    for line in steps:
        assert {"reward/scored", "reward/answered_legally", "reward/closeness"} <= line.keys()
    assert max(line["rollout/reward"] for line in steps) > 0
    assert max(line["train/grad_norm"] for line in steps) > 0
