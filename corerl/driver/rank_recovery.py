"""Restart failed ranks from the newest checkpoint, and say at which step the run goes on.

Engines that fail are replaced by `driver.engines.Engines`, while ranks go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from corerl.checkpoint.commit import read_state
from corerl.driver.checkpoints import Saves
from corerl.driver.engines import Engines
from corerl.driver.groups import RunGroups
from corerl.errors import CheckpointError, CorerlError, InsufficientResources, WorkerDied
from corerl.plan.resume import Start
from corerl.plugin.spec import ACTOR


@frozen(kw_only=True)
class RestartPoint:
    """Where a run goes on after its ranks have restarted."""

    checkpoint: Path | None  # None: the weights that the run started with
    state: Mapping[str, Any]  # the driver's, in the checkpoint
    in_memory: bool = False

    @property
    def step(self) -> int:
        """Rollout steps done."""
        return int(self.state.get("rollout_step", 0))

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "the initial weights"
        return f"the {'in-memory ' * self.in_memory}checkpoint after {self.step} step{'s' * (self.step != 1)}"


@define(kw_only=True, eq=False)
class RankRecovery:
    """Restarts all ranks of a run when some have died, as often as the actor's `train.restarts` without a new step."""

    groups: RunGroups
    engines: Engines | None
    saves: Saves
    start: Start
    trains: bool = True  # else no step depends on what ranks have lost, and none is repeated

    _used: int = field(default=0, init=False)  # restarts since the last step that was not done before
    _furthest: int = field(default=0, init=False)  # the most steps that were ever done

    @contextlib.contextmanager
    def around(self, restore: Callable[[RestartPoint], None]) -> Iterator[Sequence[WorkerDied]]:
        """If ranks die in the block, restart all as it ends, and let the run `restore` what the checkpoint says. Yields
        a list, which then has the deaths. Raises the error if no restart is allowed, or no rank has ended."""
        died: list[WorkerDied] = []
        try:
            yield died
        except WorkerDied as error:
            died.append(error)
        while died:
            self._require_allowed(died[-1])
            self._used += 1
            try:
                return restore(self._restart(died[-1]))
            except WorkerDied as error:
                died.append(error)
            except CheckpointError as unusable:  # such as of a directory that somebody has removed
                unusable.args = (f"{died[-1].message}; ranks cannot restart: {unusable.message}",)
                raise
            except InsufficientResources as refused:
                raise refused.with_cause(died[-1]) from refused

    def step_done(self) -> None:
        if self.groups.step > self._furthest:
            self._furthest, self._used = self.groups.step, 0

    def _require_allowed(self, error: WorkerDied) -> None:
        ended = any(role.group.processes.ended for role in self.groups.roles.values())
        if not ended or self.groups.stop.requested:
            raise error
        if self._used >= (allowed := self.groups.roles[ACTOR].train.restarts):
            if allowed:
                times = f"{self._used} restart{'s' * (self._used > 1)} without a new step (train.restarts)"
                error.args = (f"{error.message}; gave up after {times}",)
            raise error

    def _restart(self, error: WorkerDied) -> RestartPoint:
        groups, progress = self.groups, self.groups.progress
        with progress.phase("restart"):
            if self.engines is not None:
                self.engines.new_rendezvous()  # before engines are called: they may wait for what ranks were sending
            groups.end_ranks()
            groups.failed(error.message, ranks=True)
            point = self._newest()  # not before: ranks on other machines cannot read what is in memory here
            progress.notice(f"{error.message}; restarting all ranks from {point}{self._replayed(point)}")
            groups.start_ranks(point.checkpoint)
        disk, memory = self.saves.disk, self.saves.memory
        disk.forget(point.step if point.checkpoint == disk.newest else -1)
        if memory is not None:
            memory.forget(-1)
        return point

    def _replayed(self, point: RestartPoint) -> str:
        first, last = point.step, self.groups.step - 1  # a checkpoint of step 2 has steps 0 and 1
        if first > last or not self.trains:
            return ""
        return f"; replaying step {last}" if first == last else f"; replaying steps {first}-{last}"

    def _newest(self) -> RestartPoint:
        """The newest complete checkpoint that all ranks can read, or the run's start."""
        found = RestartPoint(checkpoint=self.start.resume, state=self.start.state)
        for saves in (self.saves.disk, None if self.groups.elsewhere else self.saves.memory):
            if saves is None:
                continue
            with contextlib.suppress(CorerlError):  # then an older one is the newest
                saves.rescue(ask=False)
            if saves.newest is not None and saves.newest != self.start.resume:
                state = read_state(saves.newest)
                point = RestartPoint(checkpoint=saves.newest, state=state, in_memory=saves.in_memory)
                found = point if found.checkpoint is None or point.step > found.step else found
        return found
