"""The engine on transformers, but for a replica that keeps old weights from some update on, and says they are new."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen

from corerl.config import option
from corerl.weights import Bucket
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import SPEC as TRANSFORMERS
from corerl_transformers.spec import TransformersConfig

NAME = "plugins.page.tests.stale_engine:SPEC"


@frozen(kw_only=True)
class StaleConfig(TransformersConfig):
    replica: int = option("the one that keeps old weights", default=1)
    updates: int = option("that it still loads", default=3)


class StaleEngine(TransformersEngine):
    def __init__(self, model: Any, options: Any, context: Any) -> None:
        super().__init__(model, options, context)
        self._stale = context.index == options.replica
        self._updates = 0

    def receive(self, manifest: Any, version: int, address: Any) -> Any:
        self._updates += 1
        return super().receive(manifest, version, address)

    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if not self._stale or self._updates <= self._options.updates:
            super()._load(bucket, flat)

    def weight_sums(self, dtype: str) -> None:
        """Unknown, as of engines that cannot say what they have loaded."""


SPEC = evolve(TRANSFORMERS, implementation="plugins.page.tests.stale_engine:StaleEngine", config=StaleConfig)
