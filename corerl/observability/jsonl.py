"""Write every metric to metrics.jsonl, one flat JSON object per line, and sampled answers to samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from attrs import asdict

from corerl.observability.files import reopen
from corerl.observability.history import METRICS_FILE
from corerl.observability.specs import JsonlOptions
from corerl.plugin.events import Evaluated, Event, RunRewound, RunStarted, SampleShown, StepFinished

SAMPLES_FILE = "samples.jsonl"


class Jsonl:
    """Writes the files. A resumed run first drops the steps that it repeats, so its files look as if it had never
    stopped. A new run keeps the previous run's files, as metrics-1.jsonl; a run that only scores appends."""

    def __init__(self, *, options: JsonlOptions, run_dir: str) -> None:
        self._options = options
        self._run_dir = Path(run_dir)
        self._metrics: IO[str] | None = None
        self._samples: IO[str] | None = None

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._open(event.repeats_from)
            case RunRewound():
                self._open(event.step, same_run=True)
            case StepFinished():
                self._write(event.step, event.metrics, self._chosen(event), kind="sampled")
            case Evaluated():
                self._write(event.step, event.metrics, self._chosen(event), kind="held-out")

    def shutdown(self, reason: str) -> None:
        self.close()

    def _open(self, before: float, *, same_run: bool = False) -> None:
        self.close()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = reopen(self._run_dir / METRICS_FILE, before=before, same_run=same_run)
        if self._options.samples != "none":
            self._samples = reopen(self._run_dir / SAMPLES_FILE, before=before, same_run=same_run)

    def close(self) -> None:
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()
        self._metrics = self._samples = None

    def _chosen(self, event: StepFinished | Evaluated) -> Sequence[SampleShown]:
        return event.samples if self._options.samples == "all" else event.shown

    def _write(self, step: int, metrics: Mapping[str, float], answers: Sequence[SampleShown], *, kind: str) -> None:
        if self._metrics is not None:
            numbers = {name: float(value) for name, value in metrics.items()}
            # JSON has neither NaN nor infinity; other readers understand null.
            plain = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._metrics.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
            self._metrics.flush()
        if self._samples is not None:
            for answer in answers:
                self._samples.write(json.dumps({"step": step, "kind": kind, **asdict(answer)}) + "\n")
            self._samples.flush()
