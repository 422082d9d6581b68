"""What an environment's tasks become, and what is said of one that cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from corerl.config import RewardConfig, RolloutConfig, structure
from corerl.plugin import SamplerRun
from corerl_verifiers.environment import load, rows, tasks_of
from corerl_verifiers.spec import SPEC, VerifiersConfig

RUN = SamplerRun(rollout=RolloutConfig(), reward=RewardConfig())


def options(**given: Any) -> VerifiersConfig:
    return structure({"environment": "my-sums", **given}, VerifiersConfig)


@pytest.mark.parametrize(
    ("given", "path", "said"),
    [
        ({"environment": ""}, "environment", "empty; name a taskset"),
        ({"environment": "openenw"}, "environment", "did you mean 'openenv'?"),
        (
            {"args": {"largest": "many"}},
            "args.largest",
            "unable to parse string as an integer, got 'many'",
        ),
        ({"args": {"smallest": 1}}, "args.smallest", "Extra inputs are not permitted, got 1"),
        ({"env": {"agent": {"max_turn": 2}}}, "env.agent.max_turn", "Extra inputs are not permitted"),
        ({"args": {"endless": True}}, "tasks", "has tasks without end; set how many"),
        ({"harness": "nul"}, "harness", "harness 'nul' not found"),
        ({"episodes": {"function": "a:b"}}, "episodes.function", "the environment plays the episodes"),
    ],
)
def test_what_cannot_be_had_is_one_line(given: dict[str, Any], path: str, said: str) -> None:
    (problem,) = SPEC.check(options(**given), RUN)
    assert problem.path == path and said in problem.text and "\n" not in problem.text


def test_tasks_are_prompts_and_their_answers() -> None:
    assert list(SPEC.check(options(), RUN)) == []
    found = rows(options())
    assert [(row["prompt"], row["answer"]) for row in found] == [(f"What is {a} + 3?", str(a + 3)) for a in range(3)]
    assert rows(options()) == found
    tasks = tasks_of(load(options()), options())
    assert [tasks[row["task"]].data.prompt_text for row in found] == [row["prompt"] for row in found]
    assert len(rows(options(args={"endless": True}, tasks=5))) == 5


@pytest.mark.parametrize(("given", "system"), [({}, "Add."), ({"system": "Count."}, "Count."), ({"system": ""}, None)])
def test_a_system_message_replaces_that_of_tasks(given: dict[str, Any], system: str | None) -> None:
    found = options(args={"system": "Add."}, **given)
    tasks = tasks_of(load(found), found)
    assert [task.data.system_prompt for task in tasks.values()] == [system] * 3
    assert [row["task"] for row in rows(found)] == list(tasks)


def test_agents_run_here_and_talk_unless_the_config_says_otherwise() -> None:
    agent = load(options()).config.agent
    assert (agent.runtime.type, agent.harness.id, agent.max_turns) == ("subprocess", "null", None)
    own = {"agent": {"harness": {"id": "bash"}, "max_turns": 4}}
    agent = load(options(env=own)).config.agent
    assert (agent.runtime.type, agent.harness.id, agent.max_turns) == ("subprocess", "bash", 4)
