"""What tests of sources share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.rollout.engines import LIMIT, Engines

E = TypeVar("E", bound=Engines)
Use = Callable[[E], E]


@pytest.fixture
def use() -> Iterator[Use[Engines]]:
    """Use these engines until the end of the test, at which neither a thread nor a task is left."""
    before = set(threading.enumerate())
    used: list[Engines] = []

    def use(engines: E) -> E:
        used.append(engines)
        return engines

    yield use
    for engines in used:
        engines.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
        assert not thread.is_alive(), thread.name


@pytest.fixture
def engines(use: Use[Engines]) -> Engines:
    return use(Engines())
