"""Measure how many seconds each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
