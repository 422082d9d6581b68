"""A run that names two tasks and nothing else: its prompts, its reward, its metrics, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reasoning_gym
from attrs import evolve

from corerl.config import load_config
from corerl.errors import ConfigError
from tests.end_to_end.command import ROOT, Command, metrics
from tests.in_process import HERE, execute_here, planned

EXAMPLE = ROOT / "examples" / "reasoning_gym.toml"
TASKS = {"count_bits", "gcd"}
pytestmark = pytest.mark.processes  # questions are made in one


def test_a_config_names_tasks_and_nothing_else(tmp_path: Path) -> None:
    plan = planned(load_config(EXAMPLE, [f"run.dir={tmp_path}/run"]))
    assert plan.rollout.reward.name == "corerl_reasoning_gym.tasks:score"
    assert plan.record["reward"]["name"] == "corerl_reasoning_gym.tasks:score"
    assert " on reasoning-gym: " in plan.title
    prompt = plan.rollout.prompts.prompt(0)
    assert prompt.text == f"{prompt.fields['question']}\n"
    lines = [line for line in EXAMPLE.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 25


def test_a_reward_that_the_config_names_takes_precedence(tmp_path: Path) -> None:
    given = load_config(EXAMPLE, [f"run.dir={tmp_path}/run", "reward.name=exact-match"])
    assert planned(given).rollout.reward.name == "exact-match"


def test_every_task_that_cannot_be_asked_is_one_line(tmp_path: Path) -> None:
    given = load_config(EXAMPLE, [f"run.dir={tmp_path}/run"])
    tasks = ["count_bit", {"name": "gcd", "options": {"max_valu": 3}}]
    with pytest.raises(ConfigError) as caught:
        planned(evolve(given, samplers={"reasoning-gym": {"tasks": tasks}}))
    assert caught.value.message.splitlines() == [
        "samplers.reasoning-gym.tasks[0]: unknown task 'count_bit'; did you mean 'count_bits'?",
        "samplers.reasoning-gym.tasks[1].options.max_valu: no argument of 'gcd'; did you mean 'max_value'?",
    ]
    with pytest.raises(ConfigError, match="^samplers.reasoning-gym.tasks: empty; name tasks of reasoning-gym"):
        planned(evolve(given, samplers={}))


def test_a_runs_rewards_are_the_scorers_of_its_tasks(tmp_path: Path) -> None:
    small = ["run.steps=2", "eval.every=2", "rollout.samples=4", "data.held_out=16", "reward.processes=0"]
    given = load_config(
        EXAMPLE, [*HERE, f"run.dir={tmp_path}/run", *small, 'extensions=[{name="jsonl",options={samples="all"}}]']
    )
    assert execute_here(given).steps_done == 2
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(shown) >= 2 * 16 * 4
    score = {"How": reasoning_gym.get_score_answer_fn("count_bits"), "Fin": reasoning_gym.get_score_answer_fn("gcd")}
    for each in shown:
        by_hand = score[each["prompt"][:3]](each["response"].strip(), {"answer": each["answer"]})
        assert each["reward"] == pytest.approx(by_hand)
    for line in [line for line in metrics(tmp_path / "run") if "train/loss" in line]:
        assert {f"reward/{task}" for task in TASKS} == {name for name in line if name.startswith("reward/")}


@pytest.mark.nightly
def test_a_small_model_learns_two_tasks(tmp_path: Path) -> None:
    """From random weights: to write an answer alone, and which one is likely."""
    with Command("train", EXAMPLE, f"run.dir={tmp_path}/run", 'extensions=[{name="jsonl"}]', logs=tmp_path) as command:
        assert command.finish() == 0, command.err
    lines = metrics(tmp_path / "run")
    held_out = [line for line in lines if "eval/reward" in line]
    assert held_out[0]["eval/reward"] < 0.1 and held_out[-1]["eval/reward"] > 0.2
    for task in TASKS:
        found = [line[f"reward/{task}"] for line in lines if f"reward/{task}" in line]
        assert sum(found[-10:]) / 10 > sum(found[:10]) / 10 + 0.05, task
