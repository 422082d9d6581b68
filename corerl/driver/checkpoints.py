"""When a run saves, and how a save of several roles becomes one checkpoint: all of it, or nothing that anyone sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define

from corerl.checkpoint.commit import begin, commit, retain
from corerl.config.schema import CheckpointConfig
from corerl.errors import SaveFailed
from corerl.plugin.events import CheckpointSaved
from corerl.plugin.observers import Observers
from corerl.trainer.group import TrainGroup
from corerl.types import Step


@define
class Checkpoints:
    """Saves of one run, at most one in flight; observers are told of each that is complete."""

    run_dir: Path
    config: CheckpointConfig
    roles: Mapping[str, TrainGroup]
    observers: Observers
    newest: Path | None = None  # that is complete
    last_step: int = -1  # rollout step of the newest one begun
    _pending: tuple[Path, Mapping[str, Any]] | None = None

    def due(self, rollout_step: int) -> bool:
        return bool(self.config.every) and rollout_step % self.config.every == 0

    def start(self, step: Step, state: Mapping[str, Any], *, background: bool) -> None:
        """Have all roles write, beside the driver's own `state`; without `background` it is complete on return."""
        self.complete(wait=True)
        partial = begin(self.run_dir, step.rollout_step)
        for name, group in self.roles.items():
            group.save(str(partial / name), step, background=background)
        self._pending = (partial, state)
        self.last_step = step.rollout_step
        self.complete(wait=not background)

    def complete(self, *, wait: bool) -> None:
        """Make a save that all ranks have written visible. Raises SaveFailed where one could not be written."""
        if self._pending is None:
            return
        written = [group.saved(wait=wait) for group in self.roles.values()]  # every role is asked, whatever one says
        if all(written):
            self._commit(*self._pending)

    def rescue(self) -> None:
        """After a failure: make the save in flight visible, where all of it is on disk or ranks can finish it.
        Raises CorerlError where it is lost."""
        if self._pending is None:
            return
        try:
            self._commit(*self._pending)  # asks no rank: they may have ended, or hang
        except SaveFailed:
            self.complete(wait=True)

    def _commit(self, partial: Path, state: Mapping[str, Any]) -> None:
        self.newest = commit(partial, state, ranks={role: len(group.layouts) for role, group in self.roles.items()})
        self._pending = None
        retain(self.run_dir, self.config.keep)
        self.observers.emit(CheckpointSaved(step=state["rollout_step"], path=str(self.newest)))
