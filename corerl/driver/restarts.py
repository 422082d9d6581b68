"""Start other ranks where some have died, or were ended as they were frozen, and say from where the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from corerl.calls import wait_all
from corerl.checkpoint.commit import read_state
from corerl.cluster.nodes import elsewhere
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.control import Control
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.driver.stop import StopRequest
from corerl.driver.updates import WeightUpdates
from corerl.errors import CorerlError, NoPlaces, WorkerDied
from corerl.plan.resume import Start
from corerl.plugin.spec import ACTOR

COPY = "copy in memory"


@frozen(kw_only=True)
class Point:
    """From where a run goes on."""

    checkpoint: Path | None  # None: the weights that the run began with
    state: Mapping[str, Any]  # the driver's, in the checkpoint
    kind: str = "checkpoint"
    version: int = 0  # of the actor's weights in it

    @property
    def step(self) -> int:
        """Rollout steps done."""
        return int(self.state.get("rollout_step", 0))

    def __str__(self) -> str:
        return f"the {self.kind} of step {self.step}" if self.checkpoint is not None else "the initial weights"


@define(kw_only=True, eq=False)
class Restarts:
    """Starts all ranks of a run anew, as often as `train.restarts` of the actor says without a new step."""

    roles: Mapping[str, Role]
    residency: Residency
    checkpoints: Checkpoints
    copies: Checkpoints | None  # in memory, of every step
    updates: WeightUpdates | None
    control: Control
    start: Start
    progress: Progress
    stop: StopRequest

    _used: int = field(default=0, init=False)  # since the last step that was not done before
    _furthest: int = field(default=0, init=False)  # the most steps that were ever done

    @contextlib.contextmanager
    def around(self, rewind: Callable[[Point], None]) -> Iterator[Callable[[], bool]]:
        """If ranks die in the block, start others from the newest checkpoint, and let the run `rewind` to it. Yields
        whether the block has ended otherwise. Raises the error if that is not allowed, or no rank has ended."""
        died: list[WorkerDied] = []
        try:
            yield lambda: not died
        except WorkerDied as error:
            died.append(error)
        while died:
            self._require_allowed(died[-1])
            self._used += 1
            try:
                return rewind(self._start_anew(died[-1]))
            except WorkerDied as error:
                died.append(error)
            except NoPlaces as refused:
                raise refused.told_with(died[-1]) from refused

    def step_done(self) -> None:
        if self.progress.step > self._furthest:
            self._furthest, self._used = self.progress.step, 0

    def _require_allowed(self, error: WorkerDied) -> None:
        ended = any(role.group.processes.ended for role in self.roles.values())
        if not ended or self.stop.requested:
            raise error
        if self._used >= self.roles[ACTOR].train.restarts:
            if self._used:
                times = f"{self._used} time{'s' * (self._used > 1)}"
                error.add_note(f"the ranks had already been started anew {times} (train.restarts)")
            raise error

    def _start_anew(self, error: WorkerDied) -> Point:
        point = self._newest()
        self.progress.notice(f"{error.message}; all ranks are started anew from {point}{self._lost(point)}")
        with self.progress.phase("starting the ranks anew"):
            self._make_way(error)
            if point.kind == COPY and self._on_others:  # since ranks have got other places
                point = self._newest()
                self.progress.notice(
                    f"ranks are on other machines than the copy in memory; they start from {point}{self._lost(point)}"
                )
            version = self._restart_ranks(point.checkpoint)
        self.checkpoints.rewound(point.step if point.checkpoint == self.checkpoints.newest else -1)
        if self.copies is not None:
            self.copies.rewound(-1)
        return evolve(point, version=version)

    def _lost(self, point: Point) -> str:
        done = self.progress.step
        again = f"step {done} is" if done == point.step + 1 else f"steps {point.step + 1} to {done} are"
        return f"; {again} done again" if done > point.step else ""

    def _newest(self) -> Point:
        """The newest complete checkpoint or copy that all ranks can read, or the run's start."""
        found = Point(checkpoint=self.start.resume, state=self.start.state)
        saves = {"checkpoint": self.checkpoints}
        if self.copies is not None and not self._on_others:
            saves[COPY] = self.copies
        for kind, each in saves.items():
            with contextlib.suppress(CorerlError):  # then an older one is the newest
                each.rescue(ask=False)
            if each.newest is not None and each.newest != self.start.resume:
                point = Point(checkpoint=each.newest, state=read_state(each.newest), kind=kind)
                found = point if found.checkpoint is None or point.step > found.step else found
        return found

    @property
    def _on_others(self) -> bool:
        """Whether ranks that a checkpoint is for have their places on other machines than this one."""
        trained = [name for name, role in self.roles.items() if role.loss is not None]
        return bool(elsewhere(slot.node for name in trained for slot in self.control.groups.room[name]))

    def _make_way(self, error: WorkerDied) -> None:
        """End all ranks, and find places for others."""
        for role in self.roles.values():
            role.group.processes.kill()
        if self.updates is not None:
            self.updates.given_up()  # before engines are called: they may wait for what these were sending
        self.residency.make_room()
        self.control.failed(error.message, ranks=True)

    def _restart_ranks(self, checkpoint: Path | None) -> int:
        """Returns the version of the actor's weights."""
        plans, room = self.control.plan.processes.roles, self.control.groups.room
        starting = {}
        for name, role in self.roles.items():
            saved = "" if checkpoint is None or role.loss is None else str(checkpoint / name)
            starting[name] = role.group.restart(saved, plans[name], room[name])
        started = wait_all(starting)
        for name, init in started.items():
            self.roles[name].restarted(init)
        self.residency.ranks_changed(self.roles)
        return started[ACTOR].weights_version
