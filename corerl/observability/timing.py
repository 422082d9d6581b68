"""Measure how many seconds each phase of a step takes, and from when to when something is done."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import frozen


@frozen
class Span:
    name: str
    began: float  # of the clock of whoever has noted it
    ended: float


class Spans:
    """Notes from when to when something is done, in any thread: `with spans("engine-0"): ...`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, float]] = {}
        self._ended: list[Span] = []
        self._changing = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self._changing:
            number, self._open[number] = next(self._numbers), (name, self.clock())
        try:
            yield
        finally:
            with self._changing:
                name, began = self._open.pop(number)
                self._ended.append(Span(name, began, self.clock()))

    def take(self) -> list[Span]:
        """Those that have ended since the last call, and those that go on, as if they ended now."""
        with self._changing:
            now, ended = self.clock(), self._ended
            self._ended = []
            return [*ended, *(Span(name, began, now) for name, began in self._open.values())]


class Phases:
    """Times phases: `with phases("rollout"): ...` adds to that name's seconds; `take()` returns and resets them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inside = 0.0  # seconds of the phases that have ended inside the current one

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase, even if it raises. A nested phase's seconds do not count for the outer one."""
        began = self._clock()
        outer, self._inside = self._inside, 0.0
        try:
            yield
        finally:
            took = self._clock() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inside
            self._inside = outer + took

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call, in order of first occurrence."""
        seconds, self._seconds = self._seconds, {}
        return seconds
