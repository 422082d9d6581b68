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

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A phase that raises is counted too."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call, in the order in which the names first came."""
        seconds, self._seconds = self._seconds, {}
        return seconds
