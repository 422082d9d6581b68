"""Tell Weights & Biases every number, the config, and the answers that are shown."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corerl.observability.specs import WandbOptions
from corerl.observability.tracking import Identity, read_config
from corerl.plugin.events import Evaluated, Event, RunFinished, RunStarted, Shown, StepFinished
from corerl.plugin.hookspecs import hookimpl

IDENTITY_FILE = "wandb.json"
STEP = "rollout_step"  # the axis of every curve: W&B's own step may not go back, as a resumed run's does


class WeightsAndBiases:
    """A resumed run goes on in the same W&B run: where it does steps again, W&B holds both numbers of such a step."""

    def __init__(self, *, options: WandbOptions, run_dir: str) -> None:
        self._options = options
        self._run_dir = Path(run_dir)
        self._run: Any = None  # a wandb.Run, from RunStarted to shutdown
        self._reason = ""  # as RunFinished has it

    @hookimpl
    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        if self._run is None:
            return
        match event:
            case StepFinished():
                every = self._options.samples_every
                shown = event.shown if every and event.step % every == 0 else ()
                self._log(event.step, event.metrics, "samples/rollout", shown)
            case Evaluated():
                self._log(event.step, event.metrics, "samples/held-out", event.shown)
            case RunFinished():
                self._reason = event.reason

    @hookimpl
    def shutdown(self, reason: str) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1 if (self._reason or reason) == "failed" else 0)

    def _start(self, event: RunStarted) -> None:
        import wandb

        options = self._options
        identity = Identity(self._run_dir / IDENTITY_FILE)
        run_id = identity.read(goes_on=event.goes_on).get("run_id") or uuid.uuid4().hex[:12]
        identity.write(run_id=run_id)
        self._run = wandb.init(
            project=options.project or None,
            entity=options.entity or None,
            name=options.name or self._run_dir.name,
            group=options.group or None,
            tags=list(options.tags) or None,
            notes=event.title,
            mode=options.mode or None,
            dir=str(self._run_dir),
            id=run_id,
            resume="allow",
            settings=wandb.Settings(console="off"),  # whose capture and the live display would each redraw the other
        )
        self._run.config.update(read_config(self._run_dir), allow_val_change=True)  # a resumed run may have another
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def _log(self, step: int, metrics: Mapping[str, float], name: str, shown: Sequence[Shown]) -> None:
        import wandb

        row: dict[str, Any] = {STEP: step, **{key: float(value) for key, value in metrics.items()}}
        if shown:
            cells = [[answer.prompt, answer.response, answer.answer, answer.reward] for answer in shown]
            row[name] = wandb.Table(columns=["prompt", "response", "expected", "reward"], data=cells)
        self._run.log(row)
