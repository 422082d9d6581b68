"""An environment of verifiers in a module of its own, as a package would have it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("verifiers") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test-verifiers` has the library

TASKSET = '''
"""Sums, with a tool."""

import asyncio
import itertools

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if a < 0:
            await asyncio.sleep(3600)
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TaskConfig):
    tools: bool = False
    broken: bool = False
    exits: bool = False
    calculator: vf.ToolsetConfig = vf.ToolsetConfig()


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.calculator)] if config.tools else []

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.config.broken:
            raise ZeroDivisionError("the judge is out")
        if self.config.exits:
            raise SystemExit("it has left")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward
    async def brief(self, trace) -> float:
        return 0.5 * (len(trace.last_reply or "") < 10)

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    largest: int = 3
    endless: bool = False
    system: str | None = None


class Sums(vf.Taskset[Sum, SumsConfig]):
    @property
    def bounded(self) -> bool:
        return super().bounded if self._bounded is not None else not self.config.endless

    def load(self):
        for a in itertools.count() if self.config.endless else range(self.config.largest):
            data = SumData(prompt=f"What is {a} + 3?", answer=str(a + 3), system_prompt=self.config.system)
            yield Sum(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `my_sums`, for this process and for those of tools."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "my_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "site"), *sys.path])))
    yield
    sys.modules.pop("my_sums", None)
