"""mini-swe-agent, which brings dependencies of its own, plays a run's episodes as it is on PyPI, in three dialects."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl_agents.episodes import Episode
from corerl_agents.script import byte_tokenizer
from corerl_transformers.spec import SPEC as TRANSFORMERS
from plugins.agents.tests.scripted_engine import ScriptedEngine, run
from tests.end_to_end.command import metrics
from tests.machine import paced

pytestmark = [
    pytest.mark.processes,
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("minisweagent") is None, reason="wants mini-swe-agent"),
    pytest.mark.filterwarnings("ignore:::(litellm|pydantic|aiohttp)"),
]
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str) -> str:
    return f"I run it.\n<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch one
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")


def play(episode: Episode, dialect: str) -> dict[str, Any]:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel
    from minisweagent.models.litellm_response_model import LitellmResponseModel

    kind = LitellmResponseModel if dialect == "responses" else LitellmModel
    url, maker = (episode.anthropic_url, "anthropic") if dialect == "messages" else (episode.base_url, "openai")
    how = {"api_base": url, "api_key": episode.api_key, "timeout": paced(60)}
    model = kind(model_name=f"{maker}/{episode.model}", model_kwargs=how, cost_tracking="ignore_errors")
    templates = {"system_template": "You use bash.", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, LocalEnvironment(), **templates, step_limit=5)
    ended: dict[str, Any] = agent.run(episode.prompt.text)
    return ended


def reply(text: str, key: int) -> str:
    """The first answer computes, the numbers of the task or, by the noise, others; the second submits what it read."""
    if results := re.findall(r"<output>\n(.*)\n</output>", text):
        return bash(f"echo {DONE}; echo {results[-1]}")
    a, b = re.findall(r"user: (\d)\+(\d)=", text)[-1]
    return bash(f"echo $(({a} + {b if key % 2 else int(b) + 1}))")


class Computing(ScriptedEngine):
    reply = staticmethod(reply)


ENGINE = evolve(TRANSFORMERS, implementation=f"{__name__}:Computing")


def computed(episode: Episode, dialect: str) -> dict[str, float]:
    ended = play(episode, dialect)
    right = ended["submission"].strip() == episode.prompt.answer
    return {"right": float(right), "submitted": float(ended["exit_status"] == "Submitted")}


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_episodes_of_mini_swe_agent_are_trained_on(dialect: str, tmp_path: Path) -> None:
    lengths = ["model.config.max_position_embeddings=8192", "rollout.max_tokens=2048", "run.steps=2"]
    how = [f"samplers.episodes.options={{dialect='{dialect}'}}", f"samplers.episodes.timeout={paced(120)}"]
    engine = f"rollout.engine={__name__}:ENGINE"
    summary = run(tmp_path, byte_tokenizer(), f"{__name__}:computed", *lengths, *how, engine)
    assert summary.steps_done == 2
    for line in [each for each in metrics(tmp_path / "run") if "train/loss" in each]:
        # Each episode is one row of two turns, and the trainer reads in it what the engine said.
        assert (line["rollout/turns"], line["rollout/rows"], line["rollout/truncated"]) == (2.0, 1.0, 0.0)
        assert line["reward/submitted"] == 1.0 and line["rollout/reward"] == line["reward/right"] + 1.0
        assert line["rollout/logprob_diff"] < 1e-4 and "rollout/failed" not in line
        assert 0 < line["reward/right"] < 1 and line["train/grad_norm"] > 0
