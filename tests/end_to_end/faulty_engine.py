"""The engine on transformers, but for a replica whose process is killed, or freezes, as often as its options say: while
it samples, then in the middle of an update, and so on in turns; or in its first two starts."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import evolve, frozen

from corerl.config.options import option
from corerl.config.schema import ModelConfig
from corerl.engines.base import EngineContext, GenerateRequest, Generation, OnFinished, ignore
from corerl.weights.manifest import Bucket
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import SPEC as TRANSFORMERS
from corerl_transformers.spec import TransformersConfig
from tests.machine import FOREVER, die_of

NAME = "tests.end_to_end.faulty_engine:SPEC"


@frozen(kw_only=True)
class FaultyConfig(TransformersConfig):
    directory: str = option("where each death leaves a file", default="")
    deaths: int = option("in all", default=2)
    how: Literal["kill", "freeze"] = option("the signal: SIGKILL or SIGSTOP", default="kill")
    starts: bool = option("its first process is killed as it starts, and the second one hangs there", default=False)
    after: int = option("requests that it answers before the first one", default=2)
    replica: int = option("the one that dies", default=1)


class FaultyEngine(TransformersEngine):
    def __init__(self, model: ModelConfig, options: Any, context: EngineContext) -> None:
        started = Path(options.directory, f"start-{context.index}")
        if options.starts and context.index == 1 and not started.with_name("hung").exists():
            if started.exists():
                started.with_name("hung").touch()
                time.sleep(FOREVER)
            started.touch()
            die_of(signal.SIGKILL)
        super().__init__(model, options, context)
        self.index = context.index
        self.requests = 0

    def generate(self, request: GenerateRequest, on_finished: OnFinished = ignore) -> Generation:
        if self.requests >= self._options.after:
            self.die(turn=0)
        self.requests += 1
        return super().generate(request, on_finished)

    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        super()._load(bucket, flat)
        self.die(turn=1)

    def die(self, turn: int) -> None:
        """If it is this replica's turn."""
        marks = Path(self._options.directory)
        deaths = len(list(marks.glob("death-*")))
        if self.index == self._options.replica and deaths < self._options.deaths and deaths % 2 == turn:
            (marks / f"death-{deaths}").touch()
            die_of(signal.SIGKILL if self._options.how == "kill" else signal.SIGSTOP)


SPEC = evolve(TRANSFORMERS, implementation="tests.end_to_end.faulty_engine:FaultyEngine", config=FaultyConfig)
