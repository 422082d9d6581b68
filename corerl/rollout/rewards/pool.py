"""Score samples in separate processes, with a time limit per sample, so that a faulty reward cannot harm the run."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from attrs import frozen

from corerl.config.schema import RewardConfig
from corerl.errors import RewardError
from corerl.rollout.rewards.base import Outcome, Reward, Sample, Scorer, Scores, gathered, samples_of
from corerl.rollout.rewards.batch import Batch, Lost, State
from corerl.rollout.rewards.process import HUNG, Process, kill
from corerl.spare import computes, free_memory, idle_cores, resident

if TYPE_CHECKING:
    from corerl.engines.fleet import Counted
    from corerl.rollout.sampler import Rollout

LOOK = 0.1  # seconds between two looks whether there is room for a further one


@contextlib.contextmanager
def scorer(reward: Reward, config: RewardConfig, told: Counted | None = None) -> Iterator[Scorer]:
    """The scorer of a run, with `config.processes` processes that end with the block. `told` hears how many samples of
    a batch are scored, and how many it has."""
    if not config.processes:
        yield InDriver(reward, told)
        return
    with contextlib.closing(RewardPool(reward, config, told)) as pool:
        yield pool


@frozen
class InDriver:
    """Scores in this process, without a time limit."""

    reward: Reward
    told: Counted | None

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        if part or self.told is None:
            return self.reward.score(rollout, part=part)
        samples = samples_of(rollout, tokens=self.reward.takes_tokens)
        self.told(0, len(samples))
        return gathered(self.reward.outcomes(samples, told=self.told), self.reward.failed_value)


class RewardPool:
    """Processes that import the reward by name; they start immediately, and construction does not wait for them. If the
    reward raises, times out or dies on a sample, only that sample fails. `batch` says which process scores what.

    Where all processes are held, each by a sample for a third of the time limit, while others wait, further processes
    take those until the batch is done: n samples that hang cost about one limit, not n. No more processes compute at
    once than in any batch, but on cores that are idle; one that waits for others, such as a server, may be called five
    times as often at once. Half of the machine's free memory is left free, whatever a container may take of it."""

    def __init__(self, reward: Reward, config: RewardConfig, told: Counted | None = None) -> None:
        self._told = told
        self._reward = reward
        self._config = config
        self._scoring = threading.Lock()
        self._closed = False
        self._processes = [Process(config) for _ in range(config.processes)]

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Raises RewardError if all samples fail (unless they are only a `part` of a batch) or the pool is closed;
        ConfigError if the processes cannot import the reward."""
        with self._scoring:
            try:
                samples = samples_of(rollout, tokens=self._reward.takes_tokens)
                outcomes = self._outcomes(samples, None if part else self._told)
                if further := self._processes[self._config.processes :]:
                    self._end(further)
            except BaseException:
                self._end(self._processes[:])  # a late answer must not be taken for one about the next rollout
                raise
        return gathered(outcomes, self._config.failed_value, part=part)

    def close(self) -> None:
        """Kill the processes, and what they have started. A thread that is scoring gets an error."""
        self._closed = True
        kill(self._processes[:])
        with self._scoring:
            self._end(self._processes[:])

    def _end(self, processes: Sequence[Process]) -> None:
        """Kill the processes, and wait for them."""
        kill(processes)
        self._processes[:] = [process for process in self._processes if process not in processes]
        for process in processes:
            process.process.join()
            process.connection.close()
            process.outcomes.close()

    def _outcomes(self, samples: Sequence[Sample], told: Counted | None) -> list[Outcome]:
        batch = Batch(self._reward, samples, self._config, self._processes, HUNG * self._config.timeout)
        look = 0.0  # when to look again for room for further processes
        while batch.goes_on():
            if told is not None:
                told(len(batch.outcomes), len(samples))
            for process in [each for each in self._processes if each.state is State.IDLE][: len(batch.waiting)]:
                try:
                    process.connection.send([samples[row] for row in batch.waiting[0]])
                except OSError:  # it has ended
                    self._end([process])
                else:
                    batch.give(process, time.monotonic())
            self._start(self._config.processes)
            if batch.look(now := time.monotonic()) and now >= look:
                look = now + LOOK
                self._start(len(self._processes) + self._room(batch))
            for process in self._awaited(batch, look if batch.hung else batch.held_at()):
                events = process.events()
                self._require_open()  # or these are of processes that `close` has killed
                for event in events:
                    batch.hear(process, event)
                if process.until <= time.monotonic():
                    batch.hear(process, Lost())
                if process.state is State.LOST:
                    self._end([process])
        return [batch.outcomes[row] for row in range(len(samples))]

    def _awaited(self, batch: Batch, look: float) -> list[Process]:
        """Wait, until `look` at most where rows wait, for a process that has told something or ended, or whose time is
        up; returns all such, and those that seem held: they may have written an outcome."""
        busy = [process for process in self._processes if process.until < math.inf]
        soonest = min([process.until for process in busy] + [look] * bool(batch.waiting))
        told = wait([process.connection for process in busy], timeout=max(0.0, soonest - time.monotonic()))
        now = time.monotonic()
        return [each for each in busy if each.connection in told or min(each.until, each.since + batch.held) <= now]

    def _room(self, batch: Batch) -> int:
        """How many further processes to start."""
        size = max(resident(process.pid) for process in self._processes)
        if not (wanted := batch.wanted(free_memory() // (2 * size) if size else 0)):
            return 0
        # One that only waits, as for a server or a lock, leaves what it could compute with to another one; one that has
        # just begun, or is about to, may be about to compute.
        at_it = [process.pid for process in self._processes if time.monotonic() - process.since > LOOK]
        begins = len(self._processes) - len(at_it)
        cores = max(self._config.processes - begins - sum(map(computes, at_it)), idle_cores() - begins)
        return max(0, min(wanted, cores))

    def _start(self, count: int) -> None:
        """Start processes until there are so many."""
        while not self._closed and len(self._processes) < count:
            self._processes.append(Process(self._config))
        self._require_open()  # also if it was closed meanwhile

    def _require_open(self) -> None:
        if self._closed:
            raise RewardError(f"the processes of reward {self._reward.name!r} were stopped because the run has ended")
