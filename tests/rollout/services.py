"""Engines in processes that tests can end."""

from __future__ import annotations

import os

from corerl.rollout.service import EngineService


class Mortal(EngineService):
    def pid(self) -> int:
        return os.getpid()
