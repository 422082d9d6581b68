"""Find out which processes are frozen, or do not get on with their start."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import ray
from attrs import define
from ray.exceptions import RayError

from corerl.cluster.process import STATUS
from corerl.cluster.watchdog import Status, late
from corerl.errors import WorkerDied

Ending = Callable[[str, str], WorkerDied]  # (name, method): the error of whoever waits for it

LOOKS = 8  # within the shorter bound


@define(kw_only=True, eq=False)
class Pulse:
    """Of one process. Looks are counted, not timed: while the driver is stopped, nobody is late."""

    actor: Any
    started: bool = False  # its object exists, and has no phase of startup any more
    status: Status | None = None  # its last answer
    missed: int = 0  # looks in a row that found no answer, since it has started
    starting: int = 0  # looks at which it was busy starting
    ended: Ending | None = None  # once it was ended
    _ref: Any = None  # of the question, until it is answered

    def look(self) -> None:
        """Look for an answer, and ask if nothing is asked."""
        if self._ref is not None and ray.wait([self._ref], timeout=0)[0]:
            with contextlib.suppress(RayError):  # it has ended, which its calls tell
                self.heard(ray.get(self._ref))
            self._ref = None
        elif self._ref is not None:
            # Before that, imports and loading may hold Python's GIL for long.
            self.missed = self.missed + 1 if self.started else 0
            self.status = None
        if not self.started and (self.status is None or self.status.place):
            self.starting += 1
        if self._ref is None:
            self._ref = self.actor.status.options(concurrency_group=STATUS).remote()

    def end(self, why: Ending) -> None:
        self.ended = why
        ray.kill(self.actor, no_restart=True)

    def heard(self, status: Status) -> None:
        self.status, self.missed = status, 0
        self.started = self.started or not status.phase


@define(kw_only=True)
class Bounds:
    """Seconds after which a process is ended; 0: never."""

    silence: float = 0.0  # of one that has started and does not answer
    start: float = 0.0  # of work until it has started

    @property
    def period(self) -> float:
        """Seconds between two looks; infinite if nothing is to be seen."""
        return min(filter(None, (self.silence, self.start)), default=math.inf) / LOOKS

    def silent(self, pulses: Mapping[int, Pulse]) -> list[int]:
        return [member for member, pulse in pulses.items() if self._over(pulse.missed, self.silence)]

    def overdue(self, pulses: Mapping[int, Pulse]) -> list[int]:
        """Not one that only waits for another."""
        found = [member for member, pulse in pulses.items() if self._over(pulse.starting, self.start)]
        awaited = late({member: pulse.status for member, pulse in pulses.items() if not pulse.started})
        if awaited:
            return [member for member in found if member in awaited]
        return [member for member in found if (status := pulses[member].status) is None or not status.waits]

    def _over(self, looks: int, seconds: float) -> bool:
        return 0 < seconds <= looks * self.period
