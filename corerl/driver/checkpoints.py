"""Decide when a run saves or copies, and commit the parts of all roles atomically as one checkpoint."""

from __future__ import annotations

import contextlib
import operator
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field

from corerl.calls import POLL_SECONDS, Future, wait_all
from corerl.checkpoint.commit import begin, begin_over, commit, put_aside, remove_all_but, retain
from corerl.checkpoint.copies import memory_of
from corerl.cluster.nodes import elsewhere
from corerl.config.schema import CheckpointConfig
from corerl.driver.progress import Progress
from corerl.driver.roles import Role
from corerl.errors import DataError, SaveFailed
from corerl.plugin.events import CheckpointSaved
from corerl.trainer.group import TrainGroup
from corerl.types import ParallelLayout, Step

ON_OTHERS = (
    "ranks are on other machines than the driver, and copies have to be complete on one; ranks that die are started "
    "anew from checkpoints (checkpoint.every)"
)


@define
class Checkpoints:
    """The saves of one run to one place, at most one in flight."""

    told: ClassVar[bool] = True  # of them observers

    run_dir: Path
    config: CheckpointConfig
    roles: Mapping[str, Role]
    progress: Progress
    newest: Path | None = None  # newest complete checkpoint
    last_step: int = -1  # rollout step of the last save started
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
        partial = self._begin(rollout_step)
        try:
            files(partial)
        except DataError as error:
            raise SaveFailed(error.message) from error
        for name, role in self.roles.items():
            enter(name)
            self._write(role.group, str(partial / name), role.step(rollout_step), background=background).result()
        self._pending = (partial, state)
        self.last_step = rollout_step
        self.complete(wait=not background)

    def complete(self, *, wait: bool) -> None:
        """Commit the pending save once all ranks have written it. Raises SaveFailed if a rank could not write."""
        if self._pending is None:
            return
        # Ask every role even if one is not done: a failure must surface now.
        written = wait_all({name: self._written(role.group, wait=wait) for name, role in self.roles.items()})
        if all(written.values()):
            self._commit(*self._pending)

    def rescue(self, *, ask: bool = True) -> None:
        """After a failure, commit the save in flight if it is all on disk or, unless they cannot be asked, the ranks
        finish it. Raises CorerlError if it is lost."""
        asked: list[Future[bool]] = []
        while self._pending is not None:
            try:
                self._commit(*self._pending)  # whatever ranks say: they may have ended, or hang in another call
            except SaveFailed:
                if not ask:
                    raise
                asked = asked or [self._written(role.group, wait=True) for role in self.roles.values()]
                written = [each.ready(POLL_SECONDS) and each.result() for each in asked]
                ask = not all(written)

    def forget(self) -> None:
        """Give up the save in flight, and earlier ones."""
        self._pending = self.newest = None

    def rewound(self, rollout_step: int) -> None:
        """Forget the save in flight: the run goes on from an earlier step, at which it has saved."""
        self._pending, self.last_step = None, rollout_step

    @property
    def _known(self) -> bool:
        """Whether the ranks are those that had everything the last time."""
        return False

    @property
    def _ranks(self) -> dict[str, int]:
        """By role."""
        return {name: len(role.group.layouts) for name, role in self.roles.items()}

    def _begin(self, rollout_step: int) -> Path:
        return begin(self.run_dir, rollout_step)

    def _write(self, group: TrainGroup, path: str, step: Step, *, background: bool) -> Future[int]:
        return group.save(path, step, background=background)

    def _written(self, group: TrainGroup, *, wait: bool) -> Future[bool]:
        return group.saved(wait=wait)

    def _commit(self, partial: Path, state: Mapping[str, Any]) -> None:
        before, self.newest = self.newest, commit(partial, state, ranks=self._ranks, known=self._known)
        self._pending = None
        self._committed(before, state)

    def _committed(self, before: Path | None, state: Mapping[str, Any]) -> None:
        """Called when `newest` has taken the place of the one `before`."""
        assert self.newest is not None
        for line in retain(self.run_dir, self.config.keep, committed=self.newest):
            self.progress.notice(f"old checkpoints: {line}")
        self.progress.tell(CheckpointSaved(step=state["rollout_step"], path=str(self.newest)))


@define
class Copies(Checkpoints):
    """Copies of every step in this machine's memory, told to nobody. The files of the one before the newest are written
    over by the next one: memory that is mapped and pinned takes longer to get than to fill."""

    told: ClassVar[bool] = False
    _spare: Path | None = None  # what the next one is written over
    _layouts: list[list[ParallelLayout]] = field(factory=list)  # of the ranks of the newest one, as their groups had it

    def due(self, rollout_step: int) -> bool:
        return True

    def give_up(self) -> None:
        """Make no more of them: give their memory back, the ranks' part too."""
        self.forget()
        self._spare = None
        shutil.rmtree(self.run_dir, ignore_errors=True)
        for role in self.roles.values():
            with contextlib.suppress(SaveFailed):  # of a copy that nobody wants any more
                role.group.copied(wait=True).result()  # ranks that wait see that the files are removed

    def _begin(self, rollout_step: int) -> Path:
        if elsewhere(node for role in self.roles.values() for node in role.group.processes.nodes):
            raise SaveFailed(ON_OTHERS)
        spare, self._spare = self._spare, None
        # What ranks that have died since were writing is not written over: they could still do so.
        remove_all_but(self.run_dir, [self.newest, spare])
        return super()._begin(rollout_step) if spare is None else begin_over(spare, rollout_step, self._ranks)

    def _write(self, group: TrainGroup, path: str, step: Step, *, background: bool) -> Future[int]:
        return group.copy(path, step)

    def _written(self, group: TrainGroup, *, wait: bool) -> Future[bool]:
        return group.copied(wait=wait)

    @property
    def _known(self) -> bool:
        # Looking at each box takes longer than all else that a step waits for. Ranks that are new bring new lists.
        return len(self._layouts) == len(self.roles) and all(map(operator.is_, self._layouts, self._now()))

    def _now(self) -> list[list[ParallelLayout]]:
        return [role.group.layouts for role in self.roles.values()]

    def _committed(self, before: Path | None, state: Mapping[str, Any]) -> None:
        self._layouts = self._now()
        if before is not None and before != self.newest:
            self._spare = put_aside(before)


def copies_of(saves: Checkpoints) -> Iterator[Copies]:
    """Copies of what is saved, until the generator is closed. What a killed run of the same directory has left there
    goes first."""
    directory = memory_of(str(saves.run_dir.absolute()))
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(mode=0o700)
        yield Copies(directory, saves.config, saves.roles, saves.progress, last_step=saves.last_step)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
