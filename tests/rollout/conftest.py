"""What tests of rollouts share."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar

import pytest

from tests.rollout.engines import LIMIT, Engines

E = TypeVar("E", bound=Engines)
Use = Callable[[E], E]


@pytest.fixture
def use() -> Iterator[Use[Engines]]:
    """Use these engines until the end of the test, at which no task is left, and no thread that does anything."""
    before = set(threading.enumerate())
    used: list[Engines] = []

    def use(engines: E) -> E:
        used.append(engines)
        return engines

    yield use
    for engines in used:
        engines.close()
    deadline = time.monotonic() + LIMIT
    while left := [each.name for each in set(threading.enumerate()) - before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)


@pytest.fixture
def engines(use: Use[Engines]) -> Engines:
    return use(Engines())


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module of the user's."""
    module = ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module
