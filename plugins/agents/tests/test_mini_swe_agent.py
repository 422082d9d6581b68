"""mini-swe-agent, which brings dependencies of its own, plays episodes as it comes from PyPI, in three dialects."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from corerl.data import Prompt
from corerl_agents.episodes import Episode
from corerl_agents.script import scripted
from tests.machine import paced

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("minisweagent") is None, reason="wants mini-swe-agent"),
    pytest.mark.filterwarnings("ignore:::(litellm|pydantic|aiohttp)"),
]
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str) -> str:
    return f"I run it.\n<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


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


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_mini_swe_agent_plays_one_row(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch one
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    answers = [bash("echo $((2 + 3))"), bash(f"echo {DONE}; echo 5")]
    with scripted(Prompt(index=0, text="What is 2 + 3?", answer="5"), answers) as script:
        assert play(script.episode, dialect) == {"exit_status": "Submitted", "submission": "5\n"}
        (row,) = script.rows
    assert [text for text, trained in row if trained] == [f"{answer}<|end|>" for answer in answers]
    results = row[2][0]
    assert results.startswith("\ntool: ") and "<returncode>0</returncode>\n<output>\n5\n</output>" in results
    assert [[tool["function"]["name"] for tool in request.tools] for request in script.requests] == [["bash"]] * 2
