"""Episodes in an environment of OpenEnv: what is seen, what is an action, rewards by turn, errors, and a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config import RewardConfig, RolloutConfig, load_config, structure
from corerl.data import Prompt
from corerl.errors import ConfigError
from corerl.models import load_tokenizer
from corerl.plugin import SamplerRun
from corerl.rollout import Failure, Judged
from corerl_agents.script import Scripted, scripted
from corerl_openenv.sampler import Actions, Environment, OpenEnvSampler, Play, shown
from corerl_openenv.server import Server, schema_of
from corerl_openenv.spec import SPEC, OpenEnvConfig, prompts
from tests.in_process import HERE, execute_here
from tests.machine import paced

RUN = SamplerRun(rollout=RolloutConfig(), reward=RewardConfig())


def options(**given: Any) -> OpenEnvConfig:
    return structure({"environment": "my-letters", **given}, OpenEnvConfig)


@pytest.mark.parametrize(
    ("given", "path", "said"),
    [
        ({"environment": ""}, "environment", "empty; name an installed package"),
        ({"environment": "nobodys-env"}, "environment", "no module 'nobodys_env' is installed"),
        ({"reset": {"seed": 3}}, "reset.seed", "each prompt has a seed of its own"),
        ({"episodes": {"function": "a:b"}}, "episodes.function", "the environment plays the episodes"),
        ({"episodes": {"tool_calls": "hrmes"}}, "episodes.tool_calls", "unknown format 'hrmes'; known: auto, none, "),
        ({"episodes": {"workers": 2}}, "episodes.workers", "the environment plays the episodes"),
    ],
)
def test_what_cannot_be_had_is_one_line(given: dict[str, Any], path: str, said: str) -> None:
    (problem,) = SPEC.check(options(**given), RUN)
    assert problem.path == path and said in problem.text
    assert list(SPEC.check(options(), RUN)) == []


def test_prompts_are_seeds() -> None:
    assert prompts(options(tasks=2))[1] == {"prompt": "seed 1", "seed": 1}
    assert len(prompts(options())) == 1000


def test_an_only_text_is_written_alone_and_others_as_json() -> None:
    alone = Actions(schema={"properties": {"letter": {"type": "string"}, "metadata": {}}})
    assert alone.read(" a\n") == {"letter": "a"} and alone.instruction.endswith("the letter of your action alone.")
    several = Actions(schema={"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]})
    assert several.read('{"x": 1}') == {"x": 1} and several.read("left") is None and several.read("[1]") is None
    assert several.read("[" * 5000) is None
    assert '"required": ["x"]' in several.instruction
    defined = Actions(schema={"properties": {"x": {"$ref": "#/$defs/Way"}}, "$defs": {"Way": {"enum": ["left"]}}})
    assert defined.instruction.endswith('"$defs": {"Way": {"enum": ["left"]}}}')
    assert shown({"text": "Hi", "metadata": {"seed": 1}}) == "Hi" and shown({"x": 1, "y": 2}) == '{"x": 1, "y": 2}'


@pytest.mark.processes
def test_an_environment_that_does_not_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"my_letters\.server\.app:nothing does not start: .*nothing"):
        Server("my_letters.server.app:nothing")


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match="^samplers.openenv.environment: nothing answers at http://127.0.0.1:9/schema"
    ):
        OpenEnvSampler(options(environment="http://127.0.0.1:9"), None)  # type: ignore[arg-type]


@pytest.mark.processes
def test_the_server_ends_with_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens: a server here is asked directly
    monkeypatch.setenv("no_proxy", "")
    server = Server("my_letters.server.app:app")
    assert schema_of(server.url)["properties"]["letter"]["type"] == "string"
    server.close()
    with pytest.raises((urllib.error.URLError, OSError)):
        schema_of(server.url)


@pytest.fixture
def environment() -> Iterator[Environment]:
    with contextlib.closing(Server("my_letters.server.app:app")) as server:
        yield Environment(url=server.url, actions=Actions(schema=schema_of(server.url)), options=options())


def played(environment: Environment, answers: list[str], *, tokens: int = 999) -> tuple[Scripted, Judged | Failure]:
    """The episode of seed 2, to whose requests a script answers; what it gives."""
    function = Play(name="my-letters", function=environment.play)
    prompt = Prompt(index=7, text="letters", answer="", fields={"seed": 2})
    with scripted(prompt, answers, rollout=RolloutConfig(max_tokens=tokens)) as script:
        outcome = asyncio.run(asyncio.wait_for(function.play(script.episode), paced(60)))
        assert isinstance(outcome, Judged | Failure)
        return script, outcome


@pytest.mark.processes
def test_each_turn_has_the_reward_of_its_step(environment: Environment) -> None:
    script, outcome = played(environment, ["c", "d"])
    assert outcome == Judged(reward=1.0, turns=(1.0, 0.0))
    system = "You act in an environment. Answer each observation with the letter of your action alone."
    assert script.asked == [[system, "c"], [system, "c", "c", "c"]]
    few = evolve(environment, options=options(turns=1, system="", reset={"first": "xyz"}))
    script, outcome = played(few, ["z", "z"])
    assert outcome == Judged(reward=1.0, turns=(1.0,)) and script.asked == [["z"]]


@pytest.mark.processes
def test_an_answer_without_room_is_no_action(environment: Environment) -> None:
    strict = evolve(environment, options=options(reset={"refused": ""}))
    assert isinstance(played(strict, ["c", ""])[1], Failure)
    assert played(strict, ["c"], tokens=10)[1] == Judged(reward=1.0, turns=(1.0, 0.0))


@pytest.mark.processes
def test_what_the_environment_refuses_costs_its_episode(environment: Environment) -> None:
    _, outcome = played(environment, ["c", "!"])
    assert isinstance(outcome, Failure) and outcome.kind == "raised"
    assert outcome.message.startswith("samplers.openenv.environment 'my-letters' raised RuntimeError:")
    assert "no such letter" in outcome.message and outcome.message.endswith("on prompt 7 ('letters')")
    assert played(environment, ["c", "c"])[1] == Judged(reward=2.0, turns=(1.0, 1.0))


CONFIG = """
run.steps = 2
cluster.device = "cpu"
data.held_out = 0
rollout = { sampler = "openenv", prompts = 4, samples = 4, max_tokens = 12 }
train.optimizer.lr = 1e-2

[samplers.openenv]
environment = "my-letters"
system = ""

[model]
tokenizer = "tokenizer"
[model.config]
model_type = "qwen3"
vocab_size = 23
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
eos_token_id = 2
"""


def trained(directory: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[dict[str, Any]]:
    """The samples of a run in its environment."""
    monkeypatch.chdir(directory)
    tokenizer = load_tokenizer(tokenizer="characters:abcd!>se 0123456789", path="")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "run.toml").write_text(CONFIG)
    every = 'extensions=[{name="jsonl",options={samples="all"}}]'
    here = [*HERE, f"run.dir={directory}/run", "checkpoint.every=0", every, *overrides]
    execute_here(load_config(directory / "run.toml", here))
    return [json.loads(line) for line in (directory / "run" / "samples.jsonl").read_text().splitlines()]


@pytest.mark.processes
def test_a_run_is_trained_on_the_environments_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rewards(trained(tmp_path, monkeypatch))


def check_rewards(samples: Sequence[Mapping[str, Any]]) -> None:
    """By hand: 1 if the last answer, which is shown, is right, and what the first one got."""
    for each in samples:
        asked = "abcd"[int(each["prompt"].removeprefix("seed ")) % 4]
        assert each["reward"] - float(each["response"].strip()[:1] == asked) in (0.0, 1.0) or "!" in each["response"]
