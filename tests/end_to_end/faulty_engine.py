"""The engine on transformers, but for a replica whose process ends while it samples, as often as it is told to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from corerl.config.schema import ModelConfig, option
from corerl.rollout.engine import EngineContext, GenerateRequest, Generation
from corerl.rollout.engines import TRANSFORMERS, TransformersConfig
from corerl.rollout.transformers_engine import TransformersEngine

NAME = "tests.end_to_end.faulty_engine:SPEC"


@frozen(kw_only=True)
class FaultyConfig(TransformersConfig):
    directory: str = option("where each death leaves a file", default="")
    deaths: int = option("in all", default=1)
    after: int = option("requests that it answers before the first one", default=2)


class FaultyEngine(TransformersEngine):
    def __init__(self, model: ModelConfig, options: Any, context: EngineContext) -> None:
        super().__init__(model, options, context)
        self.index = context.index
        self.requests = 0

    def generate(self, request: GenerateRequest) -> Generation:
        options, marks = self._options, Path(self._options.directory)
        deaths = len(list(marks.glob("death-*")))
        if self.index == 1 and deaths < options.deaths and (deaths or self.requests >= options.after):
            (marks / f"death-{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.requests += 1
        return super().generate(request)


SPEC = evolve(TRANSFORMERS, implementation="tests.end_to_end.faulty_engine:FaultyEngine", config=FaultyConfig)
