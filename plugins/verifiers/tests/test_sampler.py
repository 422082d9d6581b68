"""Episodes of an environment: its rewards, its metrics, what fails, and a run that is trained on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from corerl.config import load_config, structure
from corerl.data import Prompt
from corerl.rollout import Failure, Judged, start_user_coroutine
from corerl_agents.script import Scripted, byte_tokenizer, scripted
from corerl_verifiers.environment import load, rows, tasks_of
from corerl_verifiers.sampler import Play, Serving
from corerl_verifiers.spec import VerifiersConfig
from tests.end_to_end.command import metrics
from tests.in_process import HERE, execute_here
from tests.machine import paced

pytestmark = pytest.mark.processes  # a harness is one
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@contextmanager
def playing(answers: list[str], **given: Any) -> Iterator[tuple[Scripted, Judged | Failure]]:
    """The episode of 2 + 3, to whose requests a script answers; what it gives."""
    options = structure({"environment": "my-sums", **given}, VerifiersConfig)
    env, row = load(options), rows(options)[2]
    function = Play(name="my-sums", env=env, tasks=tasks_of(env, options), serving=(serving := Serving(env)))
    with scripted(Prompt(index=2, text=row["prompt"], answer=row["answer"], fields=row), answers) as script:
        yield script, asyncio.run(asyncio.wait_for(function.play(script.episode), paced(120)))
    start_user_coroutine(serving.end()).result(paced(30))


@pytest.mark.parametrize(
    ("answer", "reward", "parts"),
    [
        ("It is 5", 2.5, {"right": 2.0, "brief": 0.5, "characters": 7.0}),
        ("I believe it is 5", 2.0, {"right": 2.0, "brief": 0.0, "characters": 17.0}),
        ("6", 0.5, {"right": 0.0, "brief": 0.5, "characters": 1.0}),
    ],
)
def test_rewards_and_metrics_are_the_tasks_own(answer: str, reward: float, parts: dict[str, float]) -> None:
    with playing([answer]) as (script, outcome):
        assert outcome == Judged(reward=reward, parts=parts)
        assert script.asked == [["What is 2 + 3?"]] and script.text == answer


def test_the_policy_is_asked_with_the_configs_system_message() -> None:
    with playing(["5"], system="Answer by a number.") as (script, outcome):
        assert isinstance(outcome, Judged) and outcome.reward == 2.5
        assert script.asked == [["Answer by a number.", "What is 2 + 3?"]]


def test_tools_of_a_task_are_called_by_its_harness() -> None:
    with playing([CALL, "It is 5"], args={"task": {"tools": True}}) as (script, outcome):
        assert isinstance(outcome, Judged) and outcome.reward == 2.5
        assert script.asked[-1] == ["What is 2 + 3?", "", "5"]
        assert [[tool["function"]["name"] for tool in each.tools] for each in script.requests] == [["add"]] * 2


@pytest.mark.parametrize(
    ("how", "what", "said"),
    [("broken", "failed: ", "the judge is out"), ("exits", "raised SystemExit: ", "it has left")],
)
def test_an_error_of_the_environment_costs_its_sample(how: str, what: str, said: str) -> None:
    with playing(["5"], args={"task": {how: True}}) as (_, outcome):
        assert isinstance(outcome, Failure) and outcome.kind == "raised"
        assert outcome.message.startswith(f"samplers.verifiers.environment 'my-sums' {what}")
        assert said in outcome.message and outcome.message.endswith("on prompt 2 ('What is 2 + 3?')")


def test_an_episode_that_hangs_leaves_no_process() -> None:
    """Its tool does not answer, while the harness and the tool's server run."""
    options = structure({"environment": "my-sums", "args": {"task": {"tools": True}}}, VerifiersConfig)
    env, row = load(options), rows(options)[2]
    function = Play(name="my-sums", env=env, tasks=tasks_of(env, options), serving=(serving := Serving(env)))
    before, prompt = (
        {*psutil.Process().children(recursive=True)},
        Prompt(index=2, text=row["prompt"], answer="5", fields=row),
    )
    with scripted(prompt, [CALL.replace("2", "-2")]) as script:

        async def play() -> int:
            playing = asyncio.create_task(function.play(script.episode))
            while not script.requests:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            running = len({*psutil.Process().children(recursive=True)} - before)
            playing.cancel()
            await asyncio.wait([playing])
            return running

        assert asyncio.run(asyncio.wait_for(play(), paced(120))) >= 2
    start_user_coroutine(serving.end()).result(paced(30))
    _, alive = psutil.wait_procs({*psutil.Process().children(recursive=True)} - before, timeout=paced(30))
    assert alive == []


CONFIG = """
run.steps = 2
cluster.device = "cpu"
data.held_out = 0
rollout = { sampler = "verifiers", prompts = 2, samples = 2, max_tokens = 4 }

[samplers.verifiers]
environment = "my-sums"
args = { largest = 8 }

[model]
tokenizer = "tokenizer"
[model.config]
model_type = "qwen3"
vocab_size = 261
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
eos_token_id = 256
"""


def test_a_run_trains_on_the_episodes_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "run.toml").write_text(CONFIG)
    every = 'extensions=[{name="jsonl",options={samples="all"}}]'
    here = [*HERE, f"run.dir={tmp_path}/run", "checkpoint.every=0", every]
    assert execute_here(load_config(tmp_path / "run.toml", here)).steps_done == 2
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(shown) == 8
    for each in shown:
        by_hand = 2.0 * (each["answer"] in each["response"]) + 0.5 * (len(each["response"]) < 10)
        assert each["reward"] == pytest.approx(by_hand)
    for line in [line for line in metrics(tmp_path / "run") if "train/loss" in line]:
        assert {"reward/right", "reward/brief", "reward/characters"} <= line.keys()
        assert line["rollout/reward"] == pytest.approx(line["reward/right"] + line["reward/brief"], abs=1e-6)
