"""The engine on transformers, of which one replica may keep old weights from some update on, and say that they are new.
Which one is not in the config, and so not in what a run writes: the page has to find it."""

from __future__ import annotations

import os
from typing import Any

import torch
from attrs import evolve

from corerl.weights import Bucket
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import SPEC as TRANSFORMERS

NAME = "plugins.page.tests.engine:SPEC"
STALE = "PAGE_TEST_STALE"  # environment variable: index of the replica that keeps old weights; unset: none does
UPDATES = 3  # that it still loads


class TestedEngine(TransformersEngine):
    def __init__(self, model: Any, options: Any, context: Any) -> None:
        super().__init__(model, options, context)
        self._stale = os.environ.get(STALE) == str(context.index)
        self._updates = 0

    def receive(self, manifest: Any, version: int, address: Any) -> Any:
        self._updates += 1
        return super().receive(manifest, version, address)

    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if not self._stale or self._updates <= UPDATES:
            super()._load(bucket, flat)

    def weight_sums(self, dtype: str) -> None:
        """Unknown, as of engines that cannot say what they have loaded."""


SPEC = evolve(TRANSFORMERS, implementation="plugins.page.tests.engine:TestedEngine")
