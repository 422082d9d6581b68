"""Decide when a run saves, and commit the saves of all roles atomically as one checkpoint."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve

from corerl.calls import wait_all
from corerl.checkpoint.commit import begin, commit, retain
from corerl.config.schema import CheckpointConfig
from corerl.driver.progress import Progress
from corerl.driver.roles import Role
from corerl.errors import SaveFailed
from corerl.plugin.events import CheckpointSaved

MEMORY = Path("/dev/shm")


@define
class Checkpoints:
    """The saves of one run to one place, at most one in flight."""

    run_dir: Path
    config: CheckpointConfig
    roles: Mapping[str, Role]
    progress: Progress
    newest: Path | None = None  # newest complete checkpoint
    last_step: int = -1  # rollout step of the last save started
    told: bool = True  # observers are told
    _pending: tuple[Path, Mapping[str, Any]] | None = None

    def due(self, rollout_step: int) -> bool:
        return bool(self.config.every) and rollout_step % self.config.every == 0

    def start(
        self,
        rollout_step: int,
        state: Mapping[str, Any],
        *,
        background: bool,
        files: Callable[[Path], None] = lambda directory: None,
        enter: Callable[[str], None] = lambda role: None,
    ) -> None:
        """Start a save of all roles, the driver's `state`, and what `files` writes into the directory. `enter` is
        called before each role. Unless `background`, the save is complete on return."""
        self.complete(wait=True)
        partial = begin(self.run_dir, rollout_step)
        files(partial)
        for name, role in self.roles.items():
            enter(name)
            role.group.save(str(partial / name), role.step(rollout_step), background=background).result()
        self._pending = (partial, state)
        self.last_step = rollout_step
        self.complete(wait=not background)

    def complete(self, *, wait: bool) -> None:
        """Commit the pending save once all ranks have written it. Raises SaveFailed if a rank could not write."""
        if self._pending is None:
            return
        # Ask every role even if one is not done: a failure must surface now.
        written = wait_all({name: role.group.saved(wait=wait) for name, role in self.roles.items()})
        if all(written.values()):
            self._commit(*self._pending)

    def rescue(self, *, ask: bool = True) -> None:
        """After a failure, commit the save in flight if it is all on disk or, unless they cannot be asked, the ranks
        finish it. Raises CorerlError if it is lost."""
        if self._pending is None:
            return
        try:
            self._commit(*self._pending)  # without asking the ranks: they may have ended, or hang
        except SaveFailed:
            if not ask:
                raise
            self.complete(wait=True)

    def forget(self) -> None:
        """Give up the save in flight, and earlier ones."""
        self._pending = self.newest = None

    def rewound(self, rollout_step: int) -> None:
        """Forget the save in flight: the run goes on from an earlier step, at which it has saved."""
        self._pending, self.last_step = None, rollout_step

    def _commit(self, partial: Path, state: Mapping[str, Any]) -> None:
        ranks = {name: len(role.group.layouts) for name, role in self.roles.items()}
        self.newest = commit(partial, state, ranks=ranks)
        self._pending = None
        for line in retain(self.run_dir, self.config.keep, committed=self.newest):
            self.progress.notice(f"old checkpoints: {line}")
        if self.told:
            self.progress.tell(CheckpointSaved(step=state["rollout_step"], path=str(self.newest)))


def copies_of(saves: Checkpoints) -> Iterator[Checkpoints]:
    """Saves of every step into this machine's memory, until the generator is closed. What a killed run of the same
    directory has left there goes first."""
    known = hashlib.sha256(os.fsencode(saves.run_dir.absolute())).hexdigest()[:16]
    directory = MEMORY / f"corerl-{os.getuid()}-{known}"
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(mode=0o700)
        yield evolve(saves, run_dir=directory, config=evolve(saves.config, every=1, keep=1), newest=None, told=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
