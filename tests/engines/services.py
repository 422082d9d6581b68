"""Engines in processes that tests can end."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any

from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineService


def serve(fleet: EngineFleet, work: Coroutine[Any, Any, Any], ensure: Callable[[], None]) -> Any:
    """Wait for work that samples; `ensure` brings engines back each time that none is left. As a run does it."""
    future = fleet.loop.begin(work)
    try:
        while not fleet.wait(future):
            with fleet.renewing():
                ensure()
        return future.result()
    except BaseException:
        future.cancel()
        raise


class Mortal(EngineService):
    drew: list[list[int]]  # the first token of each row, by call of `generate`

    def generate(self, request: GenerateRequest) -> Generation:
        self.drew = [*getattr(self, "drew", []), [int(row[0]) for row in request.by_row()]]
        return super().generate(request)

    def last_drew(self) -> list[int]:
        return self.drew[-1]

    def pid(self) -> int:
        return os.getpid()
