"""A process that scores samples, seen from the driver, and what it does."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.connection import Connection

from corerl.config.schema import RewardConfig
from corerl.descendants import descendants
from corerl.errors import ConfigError
from corerl.rollout import loop
from corerl.rollout.rewards.base import Begun, Judged, Outcome, Reward, Sample
from corerl.rollout.rewards.batch import GRACE, START, Blocked, Event, Free, Judge, Lost, Scored, turn
from corerl.rollout.rewards.lookup import reward_of

ROOM = 3000  # bytes of outcomes that may wait to be read; a pipe has 64 KiB, or 4 where a user has many
CALL = 0.1  # seconds between two messages of a process that it has written outcomes
HUNG = 1 / 3  # of the time limit: a process without an outcome for this long is held by its sample


class Process(Judge):
    """It starts immediately; construction does not wait for it."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(until=time.monotonic() + START)
        # A fork of a process with threads (Ray's, torch's) may hang; spawned ones also get the driver's sys.path.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Outcomes have a pipe of their own, at which nobody waits: to be woken by each costs more than the reward.
        self.outcomes, written = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(theirs, written, config, time.monotonic()))
        # A Ctrl-C is for the driver: until the process has left its group, it hears none.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        theirs.close()  # now held by the process alone: the connection closes when it ends
        written.close()
        assert self.process.pid  # it was started
        self.pid = self.process.pid

    def events(self) -> list[Event]:
        """What it has told since this was asked last. Outcomes come first: what else it tells is told after them."""
        events: list[Event] = []
        try:
            while self.connection.poll():
                events.append(self.connection.recv())
        except (EOFError, OSError):
            self.process.join(GRACE)  # let it exit, to learn its exit code
            events.append(Lost(self.process.exitcode))
        found = []
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while any(fcntl.ioctl(self.outcomes.fileno(), termios.FIONREAD, bytes(4))):  # quicker than `poll`
                found.append(self.outcomes.recv())
        return [Scored(found), *events]


def kill(processes: Sequence[Process]) -> None:
    """Kill the processes, from any thread, and what they have started; a thread that waits for events notices."""
    pids = [process.pid for process in processes]
    started = descendants(*pids)
    for process in processes:
        process.process.kill()  # first, so that it starts no others
    _kill_pids(*started, *(-pid for pid in pids))


def _kill_pids(*pids: int) -> None:
    """Kill these processes, and the group of each one that is negative."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
            os.kill(pid, signal.SIGKILL)


# ---- in the process --------------------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """The sample's time is up. Not an Exception, so that the reward does not catch it as one of its own."""


def _serve(connection: Connection, outcomes: Connection, config: RewardConfig, began: float) -> None:
    """Write to `outcomes` those of each chunk, and events to `connection`, with an empty `Scored` now and then where
    some are written. The first event is the first `Free`, or the ConfigError that prevents it."""
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
        free = Free(time.monotonic() - began)
        while True:
            connection.send(free)
            samples, called, unread = connection.recv(), time.monotonic(), 0
            for place, outcome in _scored(reward, samples, config.timeout):
                if isinstance(outcome, Blocked):
                    connection.send(outcome)
                    continue
                now = time.monotonic()
                # Of most there is a number to tell, which is pickled and read in a tenth of the time.
                told = outcome.reward if isinstance(outcome, Judged) and not outcome.parts else outcome
                written = pickle.dumps((place, told, now))
                unread += len(written)
                if unread > ROOM:  # before the pipe is full: then nobody would read it
                    connection.send(Scored())
                    called, unread = now, len(written)
                outcomes.send_bytes(written)
                if now - called > CALL:
                    connection.send(Scored())
                    called, unread = now, 0


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        # A reward may run forever, and nobody waits for it.
        _kill_pids(*descendants(os.getpid()), -os.getpid())
        os._exit(1)  # where the reward has put itself into another group


def _scored(reward: Reward, samples: Sequence[Sample], limit: float) -> Iterator[tuple[int, Outcome | Blocked]]:
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
        if time.monotonic() - started > turn(limit):
            break
    while begun:
        watch = HUNG * limit / 2 if len(begun) > 1 else None
        done, _ = wait(begun, watch, FIRST_COMPLETED)
        for each in done:
            yield begun.pop(each), each.result()
        blocked = loop.blocking(watch) if watch and not done else None
        if blocked is not None and blocked in begun.values():
            yield blocked, Blocked(blocked)
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
