"""Write every metric, and the shown answers as text, to TensorBoard events in RUN_DIR/tensorboard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from corerl.messages import printable
from corerl.plugin import CheckpointSaved, Event, RunFinished, RunRewound, RunStarted, SampleShown
from corerl_observe.run_state import number
from corerl_observe.specs import TensorboardOptions
from corerl_observe.tracking import Tracker

EVENTS_DIR = "tensorboard"


class Tensorboard(Tracker):
    """Tracks a run in TensorBoard. A resumed run adds a file and makes TensorBoard forget the steps it repeats."""

    _options: TensorboardOptions
    _library: Any  # a SummaryWriter

    def start(self, event: RunStarted) -> None:
        self._open(None if math.isinf(event.repeats_from) else int(event.repeats_from))

    def _open(self, purge: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._library = SummaryWriter(log_dir=str(self._run_dir / EVENTS_DIR), purge_step=purge, flush_secs=5)

    def observe(self, event: Event) -> None:
        super().observe(event)
        if self._library is not None and isinstance(event, RunRewound):
            self._library.close()
            self._open(event.step)
        # The steps up to a checkpoint must be on disk by the time a run can resume from it.
        if self._library is not None and isinstance(event, CheckpointSaved | RunFinished):
            self._library.flush()

    def log(self, step: int, metrics: Mapping[str, float], kind: str, shown: Sequence[SampleShown]) -> None:
        for name, value in metrics.items():
            self._library.add_scalar(name, float(value), step)
        if shown:
            self._library.add_text(f"samples/{kind}", markdown(shown), step)

    def close(self, library: Any, reason: str) -> None:
        library.close()


def markdown(shown: Sequence[SampleShown]) -> str:
    """The answers as a table, with texts as code so that none of them is interpreted as markup."""
    rows = ["| prompt | response | expected | reward |", "|---|---|---|---|"]
    for answer in shown:
        cells = [_code(answer.prompt), _code(answer.response), _code(answer.answer), number(answer.reward)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _code(text: str) -> str:
    safe = printable(text).replace("|", "\\|").replace("`", "'")
    return f"`{safe}`" if safe else ""
