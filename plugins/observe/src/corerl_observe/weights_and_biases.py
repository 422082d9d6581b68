"""Send every metric, the config and the shown answers to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from corerl.plugin import RunStarted, SampleShown
from corerl_observe.specs import WandbOptions
from corerl_observe.tracking import Identity, Tracker, read_config

IDENTITY_FILE = "wandb.json"
STEP = "rollout_step"  # the x axis of every curve: W&B's own step cannot go back, as a resumed run's does


class WeightsAndBiases(Tracker):
    """Tracks a run in W&B. A resumed run continues the same W&B run, which then has two values per repeated step."""

    _options: WandbOptions
    _library: Any  # a wandb.Run

    def start(self, event: RunStarted) -> None:
        import wandb

        options = self._options
        identity = Identity(self._run_dir / IDENTITY_FILE)
        run_id = identity.read(goes_on=event.goes_on).get("run_id") or uuid.uuid4().hex[:12]
        identity.write(run_id=run_id)
        self._library = wandb.init(
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
            settings=wandb.Settings(console="off"),  # its capture and the live display would redraw each other
        )
        self._library.config.update(read_config(self._run_dir), allow_val_change=True)  # a resumed run may differ
        self._library.define_metric(STEP)
        self._library.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float], kind: str, shown: Sequence[SampleShown]) -> None:
        import wandb

        row: dict[str, Any] = {STEP: step, **{key: float(value) for key, value in metrics.items()}}
        if shown:
            cells = [[answer.prompt, answer.response, answer.answer, answer.reward] for answer in shown]
            row[f"samples/{kind}"] = wandb.Table(columns=["prompt", "response", "expected", "reward"], data=cells)
        self._library.log(row)

    def close(self, library: Any, reason: str) -> None:
        library.finish(exit_code=1 if reason == "failed" else 0)
