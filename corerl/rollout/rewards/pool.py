"""Score samples in separate processes, with a time limit per sample, so that a faulty reward cannot harm the run."""

from __future__ import annotations

import contextlib
import fcntl
import math
import multiprocessing
import os
import pickle
import signal
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as settled
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from attrs import frozen

from corerl.config.schema import RewardConfig
from corerl.descendants import descendants
from corerl.errors import ConfigError, RewardError
from corerl.rollout import loop
from corerl.rollout.rewards.base import (
    AT_ONCE,
    Begun,
    Failure,
    Judged,
    Outcome,
    Reward,
    Sample,
    Scorer,
    Scores,
    gathered,
    samples_of,
)
from corerl.rollout.rewards.lookup import reward_of
from corerl.spare import computes, free_memory, idle_cores, resident

if TYPE_CHECKING:
    from corerl.engines.fleet import Counted
    from corerl.rollout.sampler import Rollout

ROOM = 3000  # bytes of outcomes that may wait to be read; a pipe has 64 KiB, or 4 where a user has many
CALL = 0.1  # seconds between two messages of a process that it has written outcomes
TURN = 1.0  # seconds, but a quarter of the limit at most, after which a process leaves to others what it has not begun
LAG = 0.5  # seconds that a chunk may take to reach its process
HUNG = 1 / 3  # of the time limit: a process without an outcome for this long is held by its sample
FURTHER, MOST_FURTHER = 4, 64  # processes that may be started while all are held: for each that there is, and in all
LOOK = 0.1  # seconds between two looks whether there is room for a further one
GRACE = 2.0  # seconds beyond a time limit before a process is killed
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
        samples, told = samples_of(rollout, tokens=self.reward.takes_tokens), self.told
        told(0, len(samples))
        outcomes = self.reward.outcomes(samples, told=told)
        return gathered(outcomes, self.reward.failed_value)


class RewardPool:
    """Processes that import the reward by name; they start immediately, and construction does not wait for them. If the
    reward raises, times out or dies on a sample, only that sample fails. Each outcome is written as it comes, so that
    the sample at which a process is lost is known: the first one without. Of an async reward it is the one whose code
    blocks the event loop or, where that is not known, one of several, which are scored again, one by one.

    Where all processes are held, each by a sample for a third of the time limit, while others wait, further processes
    take those until the batch is done: n samples that hang cost about one limit, not n. Each has its own, from its own
    beginning. What holds for a reward that is only slow: nothing is started where samples take less than a third of
    the limit. Else no more processes compute at once than in any batch, but on cores that are idle; so one that
    computes is slowed down only by what shares its core, and of samples that hang computing as many share a limit as
    there are cores. One that waits for others, such as a server, may be called five times as often at once. Half of the
    machine's free memory is left free, whatever a container may take of it. Nothing is started where that
    takes longer than the limit."""

    def __init__(self, reward: Reward, config: RewardConfig, told: Counted | None = None) -> None:
        self._told = told
        self._reward = reward
        self._config = config
        self._scoring = threading.Lock()
        self._closed = False
        self._most = config.processes + min(FURTHER * config.processes, MOST_FURTHER)  # processes at once
        self._processes = [_Process(reward, config) for _ in range(config.processes)]

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Raises RewardError if all samples fail (unless they are only a `part` of a batch) or the pool is closed;
        ConfigError if the processes cannot import the reward."""
        with self._scoring:
            try:
                samples = samples_of(rollout, tokens=self._reward.takes_tokens)
                outcomes = self._outcomes(samples, None if part else self._told)
                if further := [each for each in self._processes if not each.ended][self._config.processes :]:
                    self._end(further)
            except BaseException:
                self._end(self._processes)  # a late answer must not be taken for one about the next rollout
                raise
        return gathered(outcomes, self._config.failed_value, part=part)

    def close(self) -> None:
        """Kill the processes, and what they have started. A thread that is scoring gets an error."""
        self._closed = True
        _kill(list(self._processes))
        with self._scoring:
            self._end(self._processes)

    def _end(self, processes: Sequence[_Process]) -> None:
        _end(processes)
        self._processes = [process for process in self._processes if not process.ended]

    def _outcomes(self, samples: Sequence[Sample], told: Counted | None) -> list[Outcome]:
        size = min(AT_ONCE, math.ceil(len(samples) / (4 * self._config.processes)) or 1)
        chunks: deque[Sequence[int]] = deque(
            range(first, min(first + size, len(samples))) for first in range(0, len(samples), size)
        )
        outcomes: dict[int, Outcome] = {}
        hung = False  # whether all processes were held while samples waited
        look, most = 0.0, self._most  # when to look again for room for further ones, and how many there may be in all
        # A row may be scored twice, if it was taken for left to others: none must be at it when the next rollout comes.
        while len(outcomes) < len(samples) or any(process.scores for process in self._processes):
            if told is not None:
                told(len(outcomes), len(samples))
            further = 0
            if hung and time.monotonic() >= look:
                further = self._room(len(chunks), most)
                look = time.monotonic() + LOOK
            self._refill(further)
            for process in self._processes:
                if not process.busy and chunks and process.begin(chunks[0], [samples[row] for row in chunks[0]]):
                    chunks.popleft()
            held = max(process.held_at for process in self._processes)  # when all are
            if chunks and not hung and held <= time.monotonic():
                hung = True
                if not self._reward.waits:  # any may hang, and hold up those that it travels with
                    chunks = deque([row] for chunk in chunks for row in chunk)
                continue
            for process in _answered(self._processes, (look if hung else held) if chunks else math.inf):
                try:
                    found, left = process.answers()
                except (RewardError, ConfigError):
                    if not hung or process.scores or self._closed or len(self._processes) <= self._config.processes:
                        raise
                    most = 0  # a further one that cannot start, as when each needs something that there is once
                    self._end([process])
                    continue
                except _Lost as lost:
                    if self._closed:
                        raise self._over() from None
                    if self._reward.waits and len(process.rows) > 1:  # any of them may be the culprit
                        chunks.extend([row] for row in process.rows)
                        continue
                    found = {row: self._failure(lost, samples[row]) for row in process.rows[:1]}
                    left = process.rows[1:]
                outcomes |= found
                chunks.extend([row] for row in left)  # one of them may hang, too
        return [outcomes[row] for row in range(len(samples))]

    def _room(self, waiting: int, most: int) -> int:
        """How many further processes to start, up to `most` processes in all, for chunks that wait."""
        coming = sum(process.starts for process in self._processes)
        wanted = min(waiting - coming, most - len(self._processes))
        if wanted <= 0 or min(process.start for process in self._processes) > self._config.timeout:  # not worth it
            return 0
        # One that only waits, as for a server or a lock, leaves what it could compute with to another one; one that has
        # just begun, or is about to, may be about to compute.
        begins = sum(not process.at_it(LOOK) for process in self._processes)
        computing = begins + sum(process.at_it(LOOK) and computes(process.pid) for process in self._processes)
        cores = max(self._config.processes - computing, idle_cores() - begins)
        size = max(resident(process.pid) for process in self._processes)
        return max(0, min(wanted, cores, free_memory() // (2 * size) - coming if size else 0))

    def _refill(self, further: int) -> None:
        """Replace the processes that have ended, and start further ones."""
        if self._closed:
            raise self._over()
        self._processes = [process for process in self._processes if not process.ended]
        count = max(self._config.processes, len(self._processes) + further)
        while len(self._processes) < count:
            self._processes.append(_Process(self._reward, self._config))
        if self._closed:  # closed meanwhile
            raise self._over()

    def _over(self) -> RewardError:
        return RewardError(f"the processes of reward {self._reward.name!r} were stopped because the run has ended")

    def _failure(self, lost: _Lost, sample: Sample) -> Failure:
        if lost.exitcode is None:
            return self._reward.late(self._config.timeout, sample)
        return self._reward.failure("died", f"ended its process ({_status(lost.exitcode)})", sample)


class _Lost(Exception):
    """A process has ended, or its time was up and it was killed."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode  # None if its time was up


class _Process:
    """One scoring process: it starts, then alternates between idle and scoring `rows`, until it has ended."""

    def __init__(self, reward: Reward, config: RewardConfig) -> None:
        # A fork of a process with threads (Ray's, torch's) may hang; spawned ones also get the driver's sys.path.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Outcomes have a pipe of their own, at which nobody waits: to be woken by each costs more than the reward.
        self._outcomes, written = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(theirs, written, config, time.monotonic()))
        # A Ctrl-C is for the driver: until the process has left its group, it hears none.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        theirs.close()  # now held by the process alone: the connection closes when it ends
        written.close()
        self._reward = reward
        self._limit = config.timeout
        self._chunk: Sequence[int] = ()
        self.rows: list[int] = []  # of its chunk, those without an outcome that are not left to others
        self.until = time.monotonic() + START  # its deadline; infinite while idle
        self.start = math.inf  # seconds that its start has taken, once it has
        self.ended = False

    @property
    def busy(self) -> bool:
        return self.until < math.inf

    @property
    def scores(self) -> bool:
        return bool(self._chunk)

    @property
    def pid(self) -> int:
        return self.process.pid or 0  # which it has, once it was started

    @property
    def starts(self) -> bool:
        return self.busy and not self.scores

    def at_it(self, seconds: float) -> bool:
        """Whether it has scored for so long since its last outcome."""
        return self.scores and time.monotonic() - self._since > seconds

    @property
    def held_at(self) -> float:
        """When it will be held by what it scores, if no outcome comes before; infinite if it scores nothing."""
        return self._since + HUNG * self._limit if self.scores else math.inf

    def begin(self, rows: Sequence[int], samples: Sequence[Sample]) -> bool:
        """Start scoring these samples; returns False if the process ended while idle."""
        try:
            self.connection.send(samples)
        except OSError:
            _end([self])
            return False
        self._chunk, self.rows, self._since = rows, list(rows), time.monotonic()
        # An async reward is at all of them at once.
        self.until = self._since + (TURN + self._limit + GRACE if self._reward.waits else self._patience)
        return True

    @property
    def _patience(self) -> float:
        """Seconds from the last outcome to the next, or, with several rows, to when it surely begins no other one."""
        return _turn(self._limit) + LAG if len(self.rows) > 1 else self._limit + GRACE

    def answers(self) -> tuple[dict[int, Outcome], Sequence[int]]:
        """The outcomes that have come, by row, and the rows that it leaves to others; none if it has just started.
        Raises _Lost if it ended or its time is up, RewardError if that happened before it had started, ConfigError if
        it cannot import the reward."""
        done = gone = False
        blocked: int | None = None
        try:
            while self.connection.poll():
                match self.connection.recv():
                    case ConfigError() as error:
                        raise error
                    case _Blocked(place=place):
                        blocked = self._chunk[place]
                    case float(seconds):
                        self.start, done = seconds, True
                    case bool(ended):
                        done = ended
        except (EOFError, OSError):
            gone = True
        found = self._written()
        if done:
            left: Sequence[int] = [row for row in self.rows if row not in found]
            self._chunk, self.rows, self.until = (), [], math.inf
            return found, left
        if blocked in self.rows:
            left = [row for row in self.rows if row not in found and row != blocked]
        elif found or (not gone and time.monotonic() < self.until):  # what was announced may have been read already
            left = ()
        elif gone:
            self.process.join(GRACE)  # let it exit, to learn its exit code
            raise self._lost()
        elif self._reward.waits or len(self.rows) < 2:
            raise self._lost()
        else:
            left = self.rows[1:]
        self.rows = [row for row in self.rows if row not in found and row not in left]
        if not self._reward.waits:
            self.until = self._since + self._patience
        return found, left

    def _written(self) -> dict[int, Outcome]:
        """The outcomes that it has written since this was asked last, by row."""
        found: dict[int, Outcome] = {}
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while _readable(self._outcomes):
                place, outcome, self._since = self._outcomes.recv()
                found[self._chunk[place]] = Judged(reward=outcome) if isinstance(outcome, float) else outcome
        return found

    def _lost(self) -> Exception:
        exitcode = self.process.exitcode
        if not self._chunk:
            return self._not_started(exitcode)
        _end([self])
        return _Lost(exitcode)

    def _not_started(self, exitcode: int | None) -> RewardError:
        how = f"did not import it within {START:g} seconds"
        if exitcode is not None:
            how = f"ended ({_status(exitcode)}) before importing it"
        return RewardError(
            f"a process for reward {self._reward.name!r} {how}: the module is slow to import, or ends the process, or "
            "the script that started the run lacks `if __name__ == '__main__':`; fix that, or set reward.processes=0"
        )

    def join(self) -> None:
        """Of a process that was killed: wait for it."""
        self.process.join()
        self.connection.close()
        self._outcomes.close()
        self._chunk, self.until, self.ended = (), math.inf, True


def _kill(processes: Sequence[_Process]) -> None:
    """Kill the processes, from any thread, and what they have started; a thread that waits for an answer notices."""
    pids = [pid for process in processes if not process.ended and (pid := process.process.pid)]
    started = descendants(*pids)
    for process in processes:
        process.process.kill()  # first, so that it starts no others
    _kill_pids(*started, *(-pid for pid in pids))


def _end(processes: Sequence[_Process]) -> None:
    """Kill the processes, and wait for them."""
    _kill(processes)
    for process in processes:
        process.join()


def _answered(processes: Sequence[_Process], look: float) -> list[_Process]:
    """Wait, until `look` at most, for a process that has answered or ended, or whose time is up; returns all such, and
    those that seem held: they may have written an outcome."""
    busy = [process for process in processes if process.busy]
    now = time.monotonic()
    soonest = min((process.until for process in busy), default=now)
    told = wait([process.connection for process in busy], timeout=max(0.0, min(soonest, look) - now))
    now = time.monotonic()
    return [process for process in busy if process.connection in told or min(process.until, process.held_at) <= now]


def _readable(connection: Connection) -> bool:
    """Whether there is anything to read, at each outcome: `Connection.poll` takes several times as long."""
    return any(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))


def _kill_pids(*pids: int) -> None:
    """Kill these processes, and the group of each one that is negative."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
            os.kill(pid, signal.SIGKILL)


def _status(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"


# ---- in the processes ------------------------------------------------------------------------------------------------


@frozen
class _Blocked:
    """A message: the code of this sample blocks the event loop; the others that have no outcome are left to others."""

    place: int  # in the list


class _TimeUp(BaseException):
    """The sample's time is up. Not an Exception, so that the reward does not catch it as one of its own."""


def _serve(connection: Connection, outcomes: Connection, config: RewardConfig, began: float) -> None:
    """Write to `outcomes` those of each list of samples, each with its place in the list and the time.monotonic() of
    its end. Say False now and then where some are written, `_Blocked` where one keeps the others from getting on, and
    True at the list's end, also if some are left to others. The first message is the seconds since `began`, once
    the reward is imported, or the ConfigError that prevents it."""
    # A child left running by a reward would hold it open, and the end of this process would not be noticed.
    for each in (connection, outcomes):
        os.set_inheritable(each.fileno(), False)
        os.register_at_fork(after_in_child=each.close)
    # Leave the driver's process group: Ctrl-C and job-wide signals are for the driver to handle.
    os.setpgrp()
    hearing = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which forgets one that came before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, hearing)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        reward = reward_of(config)
        if reward.waits:
            loop.note_samples()
    except ConfigError as error:
        connection.send(error)
        return
    with contextlib.suppress(EOFError, ConnectionError):  # the driver is gone
        done: float | bool = time.monotonic() - began
        while True:
            connection.send(done)
            done = True
            samples, called, unread = connection.recv(), time.monotonic(), 0
            for place, outcome in _scored(reward, samples, config.timeout):
                if isinstance(outcome, _Blocked):
                    connection.send(outcome)
                    continue
                now = time.monotonic()
                # Of most there is a number to tell, which is pickled and read in a tenth of the time.
                told = outcome.reward if isinstance(outcome, Judged) and not outcome.parts else outcome
                written = pickle.dumps((place, told, now))
                unread += len(written)
                if unread > ROOM:  # before the pipe is full: then nobody would read it
                    connection.send(False)
                    called, unread = now, len(written)
                outcomes.send_bytes(written)
                if now - called > CALL:
                    connection.send(False)
                    called, unread = now, 0


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        # A reward may run forever, and nobody waits for it.
        _kill_pids(*descendants(os.getpid()), -os.getpid())
        os._exit(1)  # where the reward has put itself into another group


def _turn(limit: float) -> float:
    return min(TURN, limit / 4)


def _scored(reward: Reward, samples: Sequence[Sample], limit: float) -> Iterator[tuple[int, Outcome | _Blocked]]:
    """Outcomes of the first samples, each with its place: at least one; no new one is started after the process's turn.
    An async reward is awaited for all of them at once; if one blocks the event loop, that is told, and no other one is
    waited for any more."""
    begun: dict[Future[Outcome], int] = {}
    started = time.monotonic()
    for place, sample in enumerate(samples):
        loop.SAMPLE.set(place)
        found = _timed(reward, sample, limit)
        if isinstance(found, Future):
            begun[found] = place
        else:
            yield place, found
        if time.monotonic() - started > _turn(limit):
            break
    while begun:
        watch = HUNG * limit / 2 if len(begun) > 1 else None
        done, _ = settled(begun, watch, FIRST_COMPLETED)
        for each in done:
            yield begun.pop(each), each.result()
        blocked = loop.blocking(watch) if watch and not done else None
        if blocked is not None and blocked in begun.values():
            yield blocked, _Blocked(blocked)
            for each in [each for each, place in begun.items() if place != blocked]:
                each.cancel()  # others score these
                del begun[each]


def _timed(reward: Reward, sample: Sample, limit: float) -> Begun | Outcome:
    """Score one sample, or begin to where the reward is async. A signal interrupts Python code and waits; for
    anything else the driver kills the process."""
    late = False

    def end(*_: object) -> None:
        nonlocal late
        late = True
        raise _TimeUp

    found: Begun | Outcome
    try:
        signal.signal(signal.SIGALRM, end)  # set again: the previous sample may have changed it
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            found = reward.begin(sample, limit) if reward.waits else reward.outcome(*sample)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:  # _TimeUp beside the reward's own code, or an interrupt
        found = reward.failure("raised", f"raised {type(error).__name__}", sample)
    if not late:
        return found
    if isinstance(found, Future):
        found.cancel()
    return reward.late(limit, sample)
