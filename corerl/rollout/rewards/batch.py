"""Decide which process scores which sample of a batch, without processes and clocks: what they tell and the time go in.

A process is in one of four states. What changes that, and what becomes of the rows that it has:

    STARTS  Free                     IDLE
            ConfigError, Lost        LOST, and no further one is started, if this was one; else an error ends the batch
    IDLE    `give`                   SCORES a chunk of what waits
    SCORES  Scored                   SCORES what remains of it; the time of the next row begins
            Blocked                  SCORES that row, the others wait again
            Lost by time, rows left  SCORES the first row, the others wait again: its turn is over, it begins none
            Lost                     LOST. The first row fails, the others wait again. Of several that are awaited at
                                     once, any may be the culprit: all wait again
            Free                     IDLE, what has no outcome waits again
    LOST                             it is killed, and another one is started in its place

What waits again does so row by row, as one of them may hang, too. The batch is hung from when all processes are held,
each by its row, while others wait: each then waits by itself, and further processes are of use.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Sequence
from enum import Enum

from attrs import Factory, define, field, frozen

from corerl.config.schema import RewardConfig
from corerl.errors import ConfigError, RewardError
from corerl.rollout.rewards.base import AT_ONCE, Failure, Judged, Outcome, Reward, Sample

TURN = 1.0  # seconds, but a quarter of the limit at most, after which a process leaves to others what it has not begun
LAG = 0.5  # seconds that a chunk may take to reach its process
GRACE = 2.0  # seconds beyond a time limit before a process is killed
START = 120.0  # seconds for a process to start and import the reward
FURTHER, MOST_FURTHER = 4, 64  # processes that may be started while all are held: for each that there is, and in all

State = Enum("State", ["STARTS", "IDLE", "SCORES", "LOST"])


@frozen
class Free:
    start: float  # seconds that its start has taken; it waits for a chunk, as it has started, or its turn is over


@frozen
class Scored:
    found: Sequence[tuple[int, Outcome | float, float]] = ()  # place in the chunk, outcome, time.monotonic() of its end


@frozen
class Blocked:
    place: int  # in the chunk: the code of this sample blocks the event loop; no other one is waited for any more


@frozen
class Lost:
    exitcode: int | None = None  # of a process that has ended; None if its time is up


Event = Free | Scored | Blocked | Lost | ConfigError  # the last one where the reward cannot be imported


@define(eq=False)
class Judge:
    """A process, as far as it has told."""

    until: float  # its deadline; infinite unless it starts or scores
    state: State = State.STARTS
    start: float = math.inf  # seconds that its start has taken, once it has
    chunk: Sequence[int] = ()  # the rows that it was given
    rows: Sequence[int] = ()  # of these, those without an outcome that are not left to others
    since: float = math.inf  # when its last outcome came, or it began; infinite unless it scores


@define(eq=False)
class Batch:
    reward: Reward
    samples: Sequence[Sample]
    config: RewardConfig
    judges: Sequence[Judge]  # which come and go; those beyond config.processes are further ones
    held: float  # seconds without an outcome after which a process is held by its row
    hung: bool = False
    most: int = field(init=False)  # processes at once
    waiting: deque[Sequence[int]] = field(init=False)  # chunks of rows
    outcomes: dict[int, Outcome] = Factory(dict)  # by row

    def __attrs_post_init__(self) -> None:
        count, processes = len(self.samples), self.config.processes
        self.most = processes + min(FURTHER * processes, MOST_FURTHER)
        size = min(AT_ONCE, math.ceil(count / (4 * processes)) or 1)
        self.waiting = deque(range(first, min(first + size, count)) for first in range(0, count, size))

    def goes_on(self) -> bool:
        # A row may be scored twice, if it was taken for left to others: none must be at it when the next batch comes.
        return len(self.outcomes) < len(self.samples) or any(judge.state is State.SCORES for judge in self.judges)

    def held_at(self) -> float:
        """When all processes will be held if no outcome comes before; infinite if one of them scores nothing."""
        return max(judge.since for judge in self.judges) + self.held

    def wanted(self, room: int) -> int:
        """How many further processes have something to do, where there is room for so many and they come in time."""
        if min(judge.start for judge in self.judges) > self.config.timeout:
            return 0
        coming = sum(judge.state is State.STARTS for judge in self.judges)
        return max(0, min(min(len(self.waiting), room) - coming, self.most - len(self.judges)))

    def look(self, now: float) -> bool:
        """Whether the batch is hung."""
        if not self.hung and self.waiting and self.held_at() <= now:
            self.hung = True
            if not self.reward.waits:  # any may hang, and hold up those that it travels with
                self.waiting = deque([row] for chunk in self.waiting for row in chunk)
        return self.hung

    def give(self, judge: Judge, now: float) -> None:
        """The process has been sent the first chunk that waits."""
        judge.chunk, judge.since = self.waiting.popleft(), now
        judge.until = now + TURN + self.config.timeout + GRACE  # of an async reward, which is at all of them at once
        self._become(judge, State.SCORES, judge.chunk)

    def hear(self, judge: Judge, event: Event) -> None:
        """Raises RewardError or ConfigError if processes cannot start."""
        match judge.state, event:
            case _, Free(start=start):
                judge.start = start
                self._become(judge, State.IDLE)
            case State.STARTS, ConfigError() | Lost():
                if not self.hung or len(self.judges) <= self.config.processes:
                    raise self._not_started(event.exitcode) if isinstance(event, Lost) else event
                self.most = 0  # as when each process needs something that there is once
                self._become(judge, State.LOST)
            case State.SCORES, Scored(found=found):
                for place, told, judge.since in found:
                    self.outcomes[judge.chunk[place]] = Judged(reward=told) if isinstance(told, float) else told
                self._become(judge, State.SCORES, [row for row in judge.rows if row not in self.outcomes])
            case State.SCORES, Blocked(place=place):
                self._become(judge, State.SCORES, [row for row in judge.rows if row == judge.chunk[place]])
            case State.SCORES, Lost(exitcode=None) if len(judge.rows) > 1 and not self.reward.waits:
                self._become(judge, State.SCORES, judge.rows[:1])
            case State.SCORES, Lost(exitcode=exitcode):
                if len(judge.rows) == 1 or not self.reward.waits:
                    for row in judge.rows[:1]:
                        self.outcomes.setdefault(row, self._failure(exitcode, self.samples[row]))
                self._become(judge, State.LOST)

    def _become(self, judge: Judge, state: State, rows: Sequence[int] = ()) -> None:
        """Of its rows these are still the process's; the others wait again, unless they have an outcome."""
        self.waiting.extend([row] for row in judge.rows if row not in rows and row not in self.outcomes)
        judge.state, judge.rows, limit = state, rows, self.config.timeout
        if state is not State.SCORES:
            judge.since = judge.until = math.inf
        elif not self.reward.waits:  # until the next outcome or, of several rows, until it surely begins no other one
            judge.until = judge.since + (turn(limit) + LAG if len(rows) > 1 else limit + GRACE)

    def _failure(self, exitcode: int | None, sample: Sample) -> Failure:
        if exitcode is None:
            return self.reward.late(self.config.timeout, sample)
        return self.reward.failure("died", f"ended its process ({_status(exitcode)})", sample)

    def _not_started(self, exitcode: int | None) -> RewardError:
        late = f"did not import it within {START:g} seconds"
        how = late if exitcode is None else f"ended ({_status(exitcode)}) before importing it"
        return RewardError(
            f"a process for reward {self.reward.name!r} {how}: the module is slow to import, or ends the process, or "
            "the script that started the run lacks `if __name__ == '__main__':`; fix that, or set reward.processes=0"
        )


def turn(limit: float) -> float:
    return min(TURN, limit / 4)


def _status(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
