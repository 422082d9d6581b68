"""Several engine replicas seen as one: rows are spread evenly over them, results come back in the order asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from corerl.rollout.engine import Engine, GenerateRequest, Generation


class EnginePool(Protocol):
    def generate(self, request: GenerateRequest) -> Generation:
        """The responses of all rows, in order. Raises EngineFailed."""


def split(request: GenerateRequest, parts: int) -> list[GenerateRequest]:
    """At most `parts` contiguous, non-empty requests whose row counts differ by at most one."""
    rows = len(request)
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [request.rows(start, stop) for start, stop in pairwise(bounds) if stop > start]


class LocalPool:
    """Replicas in this process, one after the other."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    def generate(self, request: GenerateRequest) -> Generation:
        parts = split(request, len(self._engines))
        return Generation.concatenate(
            [engine.generate(part) for engine, part in zip(self._engines, parts, strict=False)]
        )
