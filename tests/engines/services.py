"""Engines in processes that tests can end."""

from __future__ import annotations

import os

from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.service import EngineService


class Mortal(EngineService):
    drew: list[list[int]]  # the first token of each row, by call of `generate`

    def generate(self, request: GenerateRequest) -> Generation:
        self.drew = [*getattr(self, "drew", []), [int(row[0]) for row in request.by_row()]]
        return super().generate(request)

    def last_drew(self) -> list[int]:
        return self.drew[-1]

    def pid(self) -> int:
        return os.getpid()
