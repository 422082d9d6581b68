"""Measure how many seconds each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """`with phases("rollout"): ...` adds to that name's seconds; `take()` hands them over and starts anew."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inside = 0.0  # seconds of the phases that have ended within the one that lasts

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A phase that raises is counted too; one inside of another is counted in that one no more."""
        began = self._clock()
        outer, self._inside = self._inside, 0.0
        try:
            yield
        finally:
            took = self._clock() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inside
            self._inside = outer + took

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call, in the order in which the names first came."""
        seconds, self._seconds = self._seconds, {}
        return seconds
