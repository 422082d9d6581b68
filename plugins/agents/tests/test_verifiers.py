"""Environments of verifiers, which brings dependencies of its own, play by what docs/agents.md says."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from corerl.data import Prompt
from corerl_agents.script import scripted
from tests.machine import paced

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="wants verifiers"),
]
PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
TASKSET = '''
import verifiers.v1 as vf

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

class SumData(vf.TaskData):
    answer: str

class SumConfig(vf.TaskConfig):
    tools: bool = True
    calculator: vf.ToolsetConfig = vf.ToolsetConfig()

class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.calculator)] if config.tools else []

    @vf.reward
    async def right(self, trace) -> float:
        return 2.0 * (self.data.answer in (trace.last_reply or ""))

class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()

class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for a in range(3):
            yield Sum(SumData(prompt=f"What is {a} + 3?", answer=str(a + 3)), self.config.task)

__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.mark.parametrize(
    ("tools", "answers", "asked", "reward"),
    [
        (False, ["It is 5"], ["What is 2 + 3?"], 2.0),
        (False, ["It is 6"], ["What is 2 + 3?"], 0.0),
        (True, [CALL, "It is 5"], ["What is 2 + 3?", "", "5"], 2.0),
    ],
)
def test_environments_of_verifiers_play_unchanged(
    tools: bool,
    answers: list[str],
    asked: list[str],
    reward: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the tool's own process
    monkeypatch.setenv("EPISODE_KEY", "none")
    (block,) = re.findall(r"^```py\n(import verifiers.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    documented: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), documented)
    with scripted(Prompt(index=0, text="What is 2 + 3?", answer="5"), answers) as script:
        played = documented["play"](script.episode, taskset={"id": "my_sums", "task": {"tools": tools}})
        assert asyncio.run(asyncio.wait_for(played, paced(120))) == reward
    assert script.asked[-1] == asked and script.text == answers[-1]
    offered = [[tool["function"]["name"] for tool in request.tools] for request in script.requests]
    assert offered == [["add"] if tools else []] * len(answers)
