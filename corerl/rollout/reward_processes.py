"""Score samples in processes of their own, with a time limit per sample, so that a faulty reward cannot harm the run.

A process gets one sample at a time, or, of an async reward, a few that it awaits together. If scoring takes too long,
the process is killed. A process that was killed, or has ended by itself, is replaced, and its sample fails; if it had
several samples, each is first tried again in a process of its own, since any of them may be at fault.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from corerl.config.schema import RewardConfig
from corerl.errors import ConfigError, RewardError
from corerl.messages import note
from corerl.rollout.rewards import AT_ONCE, Outcome, Reward, Sample, ended, reward_of
from corerl.rollout.serving_process import ServingProcess, exit_status

if TYPE_CHECKING:
    from corerl.types import OnProgress

GRACE = 0.5  # seconds beyond a time limit before a process is killed
STARTING = 1.0  # seconds for what an async reward does with its samples before it awaits them
START = 120.0  # seconds for a process to start and import the reward
POLL = 1.0  # seconds between two checks whether the pool was closed


class RewardWorker(ServingProcess):
    """A process that imports the reward and scores samples. It starts immediately; construction does not wait for it.

    It sends an empty list when it has started, or the ConfigError if it cannot import the reward; and the outcomes of
    the samples that it was given. Between two samples it sends None: what is not async has run, and the time of the
    next one begins."""

    def __init__(self, config: RewardConfig) -> None:
        self.started = False
        self.places: list[int] = []  # in the batch, of the samples that it works on
        self.limit = math.inf  # seconds for one of them
        self.deadline = time.monotonic() + START
        super().__init__(_serve, config)

    @property
    def free(self) -> bool:
        return self.started and not self.places

    def give(self, places: Sequence[int], samples: Sequence[Sample], *, limit: float) -> None:
        """Raises OSError if the process has ended."""
        self.connection.send([samples[place] for place in places])
        self.places, self.limit, self.deadline = list(places), limit, time.monotonic() + limit

    def receive(self) -> dict[int, Outcome]:
        """The outcomes that it has sent, if any. Raises EOFError or OSError if it has ended, ConfigError if the reward
        cannot be imported."""
        message = self.connection.recv()
        if isinstance(message, ConfigError):
            raise message
        if message is None:
            self.deadline = time.monotonic() + self.limit
            return {}
        found = dict(zip(self.places, message, strict=True))
        self.started, self.places, self.deadline = True, [], math.inf
        return found


class RewardPool:
    """If the reward raises, takes too long or ends its process on a sample, only that sample fails. `notify` gets a
    line for each process that has ended while it had none."""

    def __init__(self, reward: Reward, config: RewardConfig, notify: Callable[[str], None] = note) -> None:
        self._reward = reward
        self._config = config
        self._notify = notify
        self._scoring = threading.Lock()
        self._closed = False
        self._workers: list[RewardWorker] = []
        self._start()

    def outcomes(self, samples: Sequence[Sample], on_progress: OnProgress | None = None) -> list[Outcome]:
        """The samples' rewards; `on_progress` gets how many are scored, and how many there are. Raises RewardError if
        the pool is closed, ConfigError if the processes cannot import the reward."""
        with self._scoring:
            try:
                return self._outcomes(samples, on_progress)
            except BaseException:
                self._end(*self._workers)  # a late outcome must not be taken for one of the next rollout
                raise

    def close(self) -> None:
        """Kill the processes, and what they have started. A thread that is scoring gets an error."""
        self._closed = True
        for worker in [*self._workers]:
            worker.kill()
        with self._scoring:
            self._end(*self._workers)

    def _start(self) -> None:
        self._require_open()
        while len(self._workers) < self._config.processes:
            self._workers.append(RewardWorker(self._config))

    def _require_open(self) -> None:
        if self._closed:
            raise RewardError(f"the processes of reward {self._reward.name!r} were stopped because the run has ended")

    def _end(self, *workers: RewardWorker) -> None:
        self._workers = [each for each in self._workers if each not in workers]
        for worker in workers:
            worker.end()

    def _replace_idle(self, worker: RewardWorker) -> None:
        self._require_open()  # or the pool has killed it
        code = worker.wait(POLL)
        how = "it has closed its connection" if code is None else exit_status(code)
        self._notify(f"a process for reward {self._reward.name!r} ended while it was idle ({how}); it is replaced")
        self._end(worker)

    def _outcomes(self, samples: Sequence[Sample], on_progress: OnProgress | None) -> list[Outcome]:
        count, is_async = len(samples), self._reward.is_async
        limit = self._config.timeout + GRACE + STARTING * is_async
        size = min(AT_ONCE, math.ceil(count / self._config.processes)) if is_async else 1
        waiting = deque([*range(count)[first : first + size]] for first in range(0, count, size))
        found: dict[int, Outcome] = {}
        while len(found) < count:
            self._start()
            if on_progress is not None:
                on_progress(len(found), count)
            for worker in [each for each in self._workers if each.free][: len(waiting)]:
                try:
                    worker.give(waiting[0], samples, limit=limit)
                    waiting.popleft()
                except OSError:
                    self._replace_idle(worker)
            for worker in self._ready():
                late = not worker.connection.poll() and worker.deadline <= time.monotonic()
                code = None
                try:
                    if not late:
                        found |= worker.receive()
                        continue
                except (EOFError, OSError):
                    code = worker.wait(POLL)
                self._require_open()  # or the pool has killed it
                if len(worker.places) == 1 or not worker.started:
                    found |= self._failed(worker, code, samples)
                elif not worker.places:
                    self._replace_idle(worker)
                    continue
                else:
                    waiting.extend([place] for place in worker.places)  # it may have been any of them
                self._end(worker)
        return [found[place] for place in range(count)]

    def _ready(self) -> list[RewardWorker]:
        """Wait, for POLL seconds at most, for workers that have sent something or ended, or whose time is up."""
        soonest = min((worker.deadline for worker in self._workers), default=0.0) - time.monotonic()
        ready = wait([worker.connection for worker in self._workers], max(0.0, min(POLL, soonest)))
        now = time.monotonic()
        return [each for each in self._workers if each.connection in ready or each.deadline <= now]

    def _failed(self, worker: RewardWorker, exitcode: int | None, samples: Sequence[Sample]) -> dict[int, Outcome]:
        """The failure of the sample at which a worker ended, or was late: then `exitcode` is None. Raises RewardError
        if the worker has not started."""
        if not worker.started:
            late = f"did not import it within {START:g} seconds"
            how = late if exitcode is None else f"ended ({exit_status(exitcode)}) before importing it"
            raise RewardError(
                f"a process for reward {self._reward.name!r} {how}: the module is slow to import, or ends the process, "
                "or the script that started the run lacks `if __name__ == '__main__':`; fix that, or set "
                "reward.processes=0"
            )
        (place,) = worker.places
        if exitcode is None:
            return {place: self._reward.late(self._config.timeout, samples[place])}
        return {place: self._reward.failure("died", f"ended its process ({exit_status(exitcode)})", samples[place])}


# ---- in the process --------------------------------------------------------------------------------------------------


def _serve(connection: Connection, config: RewardConfig) -> None:
    try:
        reward = reward_of(config)
    except ConfigError as error:
        connection.send(error)
        return
    outcomes: list[Outcome] = []
    while True:
        connection.send(outcomes)
        started: list[Outcome | Future[Outcome]] = []
        for sample in connection.recv():
            if started:
                connection.send(None)
            started.append(reward.start(sample, config.timeout))
        outcomes = [ended(each) for each in started]
