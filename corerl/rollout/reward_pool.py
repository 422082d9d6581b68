"""Score samples in separate processes, with a time limit per sample, so that a faulty reward cannot harm the run."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from attrs import frozen

from corerl.config.schema import RewardConfig
from corerl.errors import ConfigError, RewardError
from corerl.rollout.reward_lookup import reward_of
from corerl.rollout.rewards import (
    AT_ONCE,
    Begun,
    Failure,
    Outcome,
    Reward,
    Sample,
    Scorer,
    Scores,
    gathered,
    samples_of,
)

if TYPE_CHECKING:
    from corerl.rollout.fleet import Counted
    from corerl.rollout.sampler import Rollout

TURN = 1.0  # seconds after which a process returns the part of its chunk that it has not started
GRACE = 2.0  # seconds beyond its turn and one sample's time before a process is killed
START = 120.0  # seconds for a process to start and import the reward


@contextlib.contextmanager
def scorer(reward: Reward, config: RewardConfig, told: Counted | None = None) -> Iterator[Scorer]:
    """The scorer of a run, with `config.processes` processes that end with the block. `told` hears how many samples of
    a batch are scored, and how many it has."""
    if not config.processes:
        yield InDriver(reward, told)
        return
    pool = RewardPool(reward, config, told)
    try:
        yield pool
    finally:
        pool.close()


@frozen
class InDriver:
    """Scores in this process, without a time limit."""

    reward: Reward
    told: Counted | None

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        if part or self.told is None:
            return self.reward.score(rollout, part=part)
        samples, outcomes, told = samples_of(rollout, tokens=self.reward.takes_tokens), list[Outcome](), self.told
        told(0, len(samples))
        for outcome in self.reward.each_outcome(samples):
            outcomes.append(outcome)
            told(len(outcomes), len(samples))
        return gathered(outcomes, self.reward.failed_value)


class RewardPool:
    """Processes that import the reward by name; they start immediately, and construction does not wait for them. If the
    reward raises, times out or dies on a sample, only that sample fails; a lost process's chunk is scored again."""

    def __init__(self, reward: Reward, config: RewardConfig, told: Counted | None = None) -> None:
        self._told = told
        self._reward = reward
        self._config = config
        self._scoring = threading.Lock()
        self._closed = False
        self._processes = [_Process(reward.name, config) for _ in range(config.processes)]

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Raises RewardError if all samples fail (unless they are only a `part` of a batch) or the pool is closed;
        ConfigError if the processes cannot import the reward."""
        with self._scoring:
            try:
                samples = samples_of(rollout, tokens=self._reward.takes_tokens)
                outcomes = self._outcomes(samples, None if part else self._told)
            except BaseException:
                self._end()  # a late answer must not be taken for one about the next rollout
                raise
        return gathered(outcomes, self._config.failed_value, part=part)

    def close(self) -> None:
        """Kill the processes. A thread that is scoring gets an error."""
        self._closed = True
        for process in list(self._processes):
            process.kill()
        with self._scoring:
            self._end()

    def _end(self) -> None:
        while self._processes:
            self._processes.pop().end()

    def _outcomes(self, samples: Sequence[Sample], told: Counted | None) -> list[Outcome]:
        size = min(AT_ONCE, math.ceil(len(samples) / (4 * self._config.processes)) or 1)
        chunks: deque[Sequence[int]] = deque(
            range(first, min(first + size, len(samples))) for first in range(0, len(samples), size)
        )
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(samples):
            if told is not None:
                told(len(outcomes), len(samples))
            self._refill()
            for process in self._processes:
                if not process.busy and chunks and process.begin(chunks[0], [samples[row] for row in chunks[0]]):
                    chunks.popleft()
            for process in _answered(self._processes):
                rows = process.rows
                try:
                    found = process.answer()
                except _Lost as lost:
                    if len(rows) > 1:  # retry one by one to find the culprit
                        chunks.extend([row] for row in rows)
                        continue
                    found = [self._failure(lost, samples[rows[0]])]
                outcomes.update(zip(rows, found, strict=False))
                if len(found) < len(rows):
                    chunks.append(rows[len(found) :])
        return [outcomes[row] for row in range(len(samples))]

    def _refill(self) -> None:
        """Replace the processes that have ended."""
        if self._closed:
            raise self._over()
        self._processes = [process for process in self._processes if not process.ended]
        while len(self._processes) < self._config.processes:
            self._processes.append(_Process(self._reward.name, self._config))
        if self._closed:  # closed meanwhile
            raise self._over()

    def _over(self) -> RewardError:
        return RewardError(f"the processes of reward {self._reward.name!r} were stopped because the run has ended")

    def _failure(self, lost: _Lost, sample: Sample) -> Failure:
        if lost.exitcode is None:
            return self._reward.late(self._config.timeout, *sample[:2])
        return self._reward.failure("died", f"ended its process ({_status(lost.exitcode)})", *sample[:2])


class _Lost(Exception):
    """A process has ended, or its time was up and it was killed."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode  # None if its time was up


class _Process:
    """One scoring process: it starts, then alternates between idle and scoring `rows`, until it has ended."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        # A fork of a process with threads (Ray's, torch's) may hang; spawned ones also get the driver's sys.path.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config))
        # A Ctrl-C is for the driver: until the process has left its group, it hears none.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        theirs.close()  # now held by the process alone: the connection closes when it ends
        self._name = name
        self._time = TURN + config.timeout + GRACE
        self.rows: Sequence[int] = ()
        self.until = time.monotonic() + START  # its deadline; infinite while idle
        self.ended = False

    @property
    def busy(self) -> bool:
        return self.until < math.inf

    def begin(self, rows: Sequence[int], samples: Sequence[Sample]) -> bool:
        """Start scoring these samples; returns False if the process ended while idle."""
        try:
            self.connection.send(samples)
        except OSError:
            self.end()
            return False
        self.rows, self.until = rows, time.monotonic() + self._time
        return True

    def answer(self) -> list[Outcome]:
        """Rewards of its first rows; none if it has just started. Raises _Lost if it ended or its time is up,
        RewardError if that happened before it had started, ConfigError if it cannot import the reward."""
        found: list[Outcome] | ConfigError | None = None
        try:
            if self.connection.poll():
                found = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)  # let it exit, to learn its exit code
        if found is None:
            exitcode = self._process.exitcode
            if not self.rows:
                raise self._not_started(exitcode)
            self.end()
            raise _Lost(exitcode)
        if isinstance(found, ConfigError):
            raise found
        self.rows, self.until = (), math.inf
        return found

    def _not_started(self, exitcode: int | None) -> RewardError:
        how = f"did not import it within {START:g} seconds"
        if exitcode is not None:
            how = f"ended ({_status(exitcode)}) before importing it"
        return RewardError(
            f"a process for reward {self._name!r} {how}: the module is slow to import, or ends the process, or the "
            "script that started the run lacks `if __name__ == '__main__':`; fix that, or set reward.processes=0"
        )

    def kill(self) -> None:
        """Kill the process, from any thread; a thread that waits for its answer notices."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self.until, self.ended = math.inf, True


def _answered(processes: Sequence[_Process]) -> list[_Process]:
    """Wait for at least one process that has answered or ended, or whose time is up; returns all such."""
    busy = [process for process in processes if process.busy]
    now = time.monotonic()
    soonest = min((process.until for process in busy), default=now)
    told = wait([process.connection for process in busy], timeout=max(0.0, soonest - now))
    return [process for process in busy if process.connection in told or process.until <= time.monotonic()]


def _status(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"


# ---- in the processes ------------------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """The sample's time is up. Not an Exception, so that the reward does not catch it as one of its own."""


def _serve(connection: Connection, config: RewardConfig) -> None:
    """Answer each list of samples with the outcomes of its first ones. The first message is an empty answer once the
    reward is imported, or the ConfigError that prevents it."""
    os.set_inheritable(connection.fileno(), False)  # a child left running by a reward would hold it open
    # Leave the driver's process group: Ctrl-C and job-wide signals are for the driver to handle.
    os.setpgrp()
    hearing = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which forgets one that came before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, hearing)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        reward = reward_of(config)
    except ConfigError as error:
        connection.send(error)
        return
    samples: Sequence[Sample] = ()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the driver is gone
        while True:
            connection.send(_score(reward, samples, config.timeout))
            samples = connection.recv()


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)  # a reward may run forever, and nobody waits for it


def _score(reward: Reward, samples: Sequence[Sample], limit: float) -> list[Outcome]:
    """Outcomes of the first samples: at least one; no new one is started after `TURN` seconds. An async reward is
    awaited for all of them at once."""
    begun: list[Begun | Outcome] = []
    started = time.monotonic()
    for sample in samples:
        begun.append(_timed(reward, sample, limit))
        if time.monotonic() - started > TURN:
            break
    return [each.result() if isinstance(each, Future) else each for each in begun]


def _timed(reward: Reward, sample: Sample, limit: float) -> Begun | Outcome:
    """Score one sample, or begin to where the reward is async. A signal interrupts Python code and waits; for
    anything else the driver kills the process."""

    def end(*_: object) -> None:
        raise _TimeUp

    try:
        signal.signal(signal.SIGALRM, end)  # set again: the previous sample may have changed it
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            return reward.begin(*sample, limit) if reward.waits else reward.outcome(*sample)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        return reward.late(limit, *sample[:2])
    except BaseException as error:  # such as asyncio's CancelledError, which must not end this process
        return reward.failure("raised", f"raised {type(error).__name__}", *sample[:2])
