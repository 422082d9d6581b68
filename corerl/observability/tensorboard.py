"""Write every number, and the answers that are shown as text, to TensorBoard events in RUN_DIR/tensorboard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corerl.observability.specs import TensorboardOptions
from corerl.observability.text import number, printable
from corerl.plugin.events import CheckpointSaved, Evaluated, Event, RunFinished, RunStarted, Shown, StepFinished
from corerl.plugin.hookspecs import hookimpl

EVENTS_DIR = "tensorboard"


class Tensorboard:
    """A resumed run adds a file of its own, and has TensorBoard forget the steps that it does again."""

    def __init__(self, *, options: TensorboardOptions, run_dir: str) -> None:
        self._options = options
        self._directory = Path(run_dir) / EVENTS_DIR
        self._writer: Any = None  # a SummaryWriter, from RunStarted to shutdown

    @hookimpl
    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            purge = None if math.isinf(event.repeats_from) else int(event.repeats_from)
            self._writer = SummaryWriter(log_dir=str(self._directory), purge_step=purge, flush_secs=5)
        if self._writer is None:
            return
        match event:
            case StepFinished():
                self._scalars(event.step, event.metrics)
                every = self._options.samples_every
                if every and event.step % every == 0:
                    self._text("samples/rollout", event.step, event.shown)
            case Evaluated():
                self._scalars(event.step, event.metrics)
                self._text("samples/held-out", event.step, event.shown)
            case CheckpointSaved() | RunFinished():
                # What a resumed run keeps must be on disk by the time that it can be resumed.
                self._writer.flush()

    @hookimpl
    def shutdown(self, reason: str) -> None:
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def _text(self, tag: str, step: int, shown: Sequence[Shown]) -> None:
        if shown:
            self._writer.add_text(tag, markdown(shown), step)


def markdown(shown: Sequence[Shown]) -> str:
    """A table, with what the model wrote as code, so that none of it is taken for markup."""
    rows = ["| prompt | response | expected | reward |", "|---|---|---|---|"]
    for answer in shown:
        cells = [_code(answer.prompt), _code(answer.response), _code(answer.answer), number(answer.reward)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _code(text: str) -> str:
    safe = printable(text).replace("|", "\\|").replace("`", "'")
    return f"`{safe}`" if safe else ""
