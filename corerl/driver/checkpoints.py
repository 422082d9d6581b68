"""Decide when a run saves, and commit the parts of all roles atomically as one checkpoint, on disk or in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, evolve, frozen

from corerl.calls import POLL_SECONDS, Future, wait_all
from corerl.checkpoint.commit import begin, commit, retain
from corerl.checkpoint.writer import in_memory, memory_of
from corerl.cluster.nodes import elsewhere
from corerl.config.schema import CheckpointConfig
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.errors import DataError, ResizeFailed, SaveFailed
from corerl.plan.residency import REST, save_stage
from corerl.plugin.events import CheckpointSaved


@frozen(kw_only=True)
class DriverPart:
    """The driver's part of a checkpoint."""

    state: Mapping[str, Any]
    write: Callable[[Path], None] = lambda directory: None  # writes more files into the checkpoint


@define
class Checkpoints:
    """A run's saves to its directory, at most one in flight."""

    in_memory: ClassVar[bool] = False

    run_dir: Path
    config: CheckpointConfig
    roles: Mapping[str, Role]
    residency: Residency
    progress: Progress
    newest: Path | None = None  # newest complete checkpoint
    last_step: int = -1  # rollout step of the last save started
    _pending: tuple[Path, Mapping[str, Any]] | None = None

    def due(self, rollout_step: int) -> bool:
        return bool(self.config.every) and rollout_step % self.config.every == 0

    def start(self, driver: DriverPart, *, background: bool) -> None:
        """Start a save of all roles and the driver's part, after the steps that are done. Unless `background`, the save
        is complete on return."""
        self.complete(wait=True)
        step = self.progress.steps_done
        partial = begin(self.run_dir, step)
        try:
            try:
                driver.write(partial)
            except DataError as error:
                raise SaveFailed(error.message) from error
            for name, role in self.roles.items():
                self.residency.enter(save_stage(name))
                role.group.save(str(partial / name), role.step(step), background=background).result()
        except SaveFailed:
            if not background:  # nobody writes there any more
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._pending = (partial, driver.state)
        self.last_step = step
        self.complete(wait=not background)

    def complete(self, *, wait: bool) -> None:
        """Commit the pending save once all ranks have written it. Raises SaveFailed if a rank could not write."""
        if self._pending is None:
            return
        # Ask every role even if one is not done: a failure must surface now.
        if all(wait_all(dict(enumerate(self._written(wait=wait)))).values()):
            self._commit(*self._pending)

    def rescue(self, *, ask: bool = True) -> None:
        """After a failure, commit the save in flight if it is all written or, unless ranks cannot be asked, they
        finish it. Raises CorerlError if it is lost."""
        asked: list[Future[bool]] = []
        while self._pending is not None:
            try:
                self._commit(*self._pending)  # whatever ranks say: they may have ended, or hang in another call
            except SaveFailed:
                if not ask:
                    raise
                asked = asked or self._written(wait=True)
                written = [each.ready(POLL_SECONDS) and each.result() for each in asked]
                ask = not all(written)

    def forget(self, rollout_step: int) -> None:
        """Forget the save in flight: the run goes on from an earlier step, and this is the last one saved here."""
        self._pending, self.last_step = None, rollout_step

    def _written(self, *, wait: bool) -> list[Future[bool]]:
        memory = in_memory(self.run_dir)  # as the ranks tell them apart
        return [role.group.saved(wait=wait, memory=memory) for role in self.roles.values()]

    def _commit(self, partial: Path, state: Mapping[str, Any]) -> None:
        ranks = {name: len(role.group.layouts) for name, role in self.roles.items()}
        self.newest = commit(partial, state, ranks=ranks)
        self._pending = None
        for line in retain(self.run_dir, self.config.keep, committed=self.newest):
            self.progress.notice(f"old checkpoints: {line}")
        if not self.in_memory:
            self.progress.emit(CheckpointSaved(step=state["rollout_step"], path=str(self.newest)))


@define
class MemoryCheckpoints(Checkpoints):
    """In-memory checkpoints (/dev/shm), one after each step: failed ranks restart from the newest. They end with the
    run, and observers get no event for them."""

    in_memory: ClassVar[bool] = True

    @classmethod
    @contextmanager
    def of_run(cls, saves: Checkpoints) -> Iterator[MemoryCheckpoints]:
        """Those of a run that saves to disk too. What a killed run of the same directory has left goes first."""
        directory = memory_of(saves.run_dir)
        config = evolve(saves.config, keep=1)
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir(mode=0o700)
            yield cls(directory, config, saves.roles, saves.residency, saves.progress, last_step=saves.last_step)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def start(self, driver: DriverPart, *, background: bool) -> None:
        if elsewhere(node for role in self.roles.values() for node in role.group.processes.nodes):
            raise SaveFailed(
                "ranks are on other machines than the driver; failed ranks restart from checkpoints on disk"
            )
        super().start(driver, background=background)

    def give_up(self) -> None:
        """Free their memory, since no more are made."""
        self.newest = None
        self.forget(self.last_step)
        shutil.rmtree(self.run_dir, ignore_errors=True)


@define(kw_only=True, eq=False)
class Saves:
    """When a run saves, on disk and in memory."""

    disk: Checkpoints
    memory: MemoryCheckpoints | None  # None: none, or no more

    def after_step(self, driver: Callable[[], DriverPart], *, last: bool, resumable: bool) -> None:
        """Commit what has been written, and start what is due: on disk every so many steps and after the last one, in
        memory after each `resumable` one."""
        self.disk.complete(wait=False)
        if last or self.disk.due(self.disk.progress.steps_done):
            self.disk.start(driver(), background=self.disk.config.background and not last)
        if resumable and not last:
            self._save_in_memory(driver, background=True)

    def for_restart(self, driver: Callable[[], DriverPart]) -> Path:
        """A complete checkpoint of this step, in memory if the run keeps those. Raises ResizeFailed if it cannot be
        written and all ranks are still there: the run goes on, and its next save may have room."""
        self.disk.complete(wait=True)  # ranks that are about to end write it
        self._save_in_memory(driver, background=False)
        saves = self.memory or self.disk
        if saves.last_step != saves.progress.steps_done:
            try:
                saves.start(driver(), background=False)
            except SaveFailed as error:
                if any(role.group.processes.ended for role in saves.roles.values()):
                    raise
                raise ResizeFailed(f"no checkpoint to restart from: {error.message}") from error
        assert saves.newest is not None
        return saves.newest

    def finish(self, driver: Callable[[], DriverPart]) -> Path | None:
        """Complete a checkpoint of the last step on disk; returns the newest one."""
        if self.disk.last_step != self.disk.progress.steps_done:
            self.disk.residency.enter(REST)
            self.disk.start(driver(), background=False)
        self.disk.complete(wait=True)
        return self.disk.newest

    def _save_in_memory(self, driver: Callable[[], DriverPart], *, background: bool) -> None:
        """Start an in-memory checkpoint of this step, if the run keeps those and has none yet, or complete it."""
        memory = self.memory
        if memory is None:
            return
        try:
            if memory.last_step != memory.progress.steps_done:
                memory.start(driver(), background=background)
            memory.complete(wait=not background)
        except SaveFailed as error:
            memory.progress.notice(f"no more in-memory checkpoints: {error.message}")
            self.memory = None
            memory.give_up()
