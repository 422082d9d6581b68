"""Score samples in processes of their own, each sample with a time limit: what a reward does there harms no run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from corerl.config.schema import RewardConfig
from corerl.data.prompts import Prompt
from corerl.errors import RewardError
from corerl.rollout.rewards import Failure, Reward, Scorer, Scores, gathered, resolve_reward, samples_of

if TYPE_CHECKING:
    from corerl.rollout.sampler import Rollout

Sample = tuple[Prompt, str]

LARGEST_CHUNK = 32  # samples that travel together: a message costs as much as 50 cheap rewards
TURN = 1.0  # seconds after which a process hands back what it has not begun of its chunk
GRACE = 2.0  # seconds that a process is given beyond its turn and one sample's time before it is killed
START = 120.0  # seconds for a process to start and import the reward


@contextlib.contextmanager
def scorer(reward: Reward, config: RewardConfig) -> Iterator[Scorer]:
    """What scores the samples of a run, in as many processes as `config` says; they end with the block."""
    if not config.processes:
        yield evolve(reward, failed_value=config.failed_value)
        return
    pool = RewardPool(reward, config)
    try:
        yield pool
    finally:
        pool.close()


class RewardPool:
    """Processes that import the reward by its name, begun at once and not waited for. A sample on which it raises,
    takes too long or ends its process is a failure among the scores; the others of its chunk are scored again then."""

    def __init__(self, reward: Reward, config: RewardConfig) -> None:
        self._reward = reward
        self._config = config
        self._pool = ProcessPool(
            max_workers=config.processes,
            initializer=_begin,
            initargs=(reward.name,),
            # A fork of a process with threads (Ray's, torch's) may hang; spawned ones also have the driver's sys.path.
            context=multiprocessing.get_context("spawn"),
        )
        self._started: ProcessFuture[None] = self._pool.schedule(_resolve, args=(reward.name, reward.options))

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Raises RewardError where all samples fail, unless they are a `part` of a batch; ConfigError where the
        processes cannot import the reward."""
        self._wait_started()
        samples = samples_of(rollout)
        outcomes: dict[int, float | Failure] = {}
        size = min(LARGEST_CHUNK, math.ceil(len(samples) / (4 * self._config.processes)) or 1)
        waiting: dict[ProcessFuture[list[float | Failure]], Sequence[int]] = {}

        def start(rows: Sequence[int]) -> None:
            if rows:
                waiting[self._schedule([samples[row] for row in rows])] = rows

        for first in range(0, len(samples), size):
            start(range(first, min(first + size, len(samples))))
        while waiting:
            concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in [each for each in waiting if each.done()]:
                rows = waiting.pop(future)
                try:
                    found = future.result()
                except (TimeoutError, ProcessExpired) as error:
                    if len(rows) > 1:  # one of them is to blame
                        for row in rows:
                            start([row])
                        continue
                    found = [self._lost(samples[rows[0]], error)]
                outcomes.update(zip(rows, found, strict=False))
                start(rows[len(found) :])
        return gathered([outcomes[row] for row in range(len(samples))], self._config.failed_value, part=part)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._pool.stop()
        self._pool.join()

    def _wait_started(self) -> None:
        try:
            self._started.result(timeout=START)
        except (TimeoutError, ProcessExpired) as error:
            raise RewardError(
                f"no process for reward {self._reward.name!r} has started in {START:g} seconds: its module takes "
                "longer to import, or ends the process, or the run is started by a script without "
                "`if __name__ == '__main__':`; mend that, or set reward.processes=0"
            ) from error

    def _schedule(self, samples: Sequence[Sample]) -> ProcessFuture[list[float | Failure]]:
        limit = self._config.timeout
        return self._pool.schedule(
            _score, args=(self._reward.name, self._reward.options, samples, limit), timeout=TURN + limit + GRACE
        )

    def _lost(self, sample: Sample, error: TimeoutError | ProcessExpired) -> Failure:
        if isinstance(error, TimeoutError):
            return _late(self._reward, sample, self._config.timeout)
        return self._reward.failure("died", f"ended its process ({_end(error.exitcode)})", *sample)


def _end(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"


def _late(reward: Reward, sample: Sample, limit: float) -> Failure:
    return reward.failure("timeout", f"took longer than reward.timeout={limit:g} seconds", *sample)


# ---- in the processes ------------------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """The sample's time is over; no Exception, lest the reward take it for one of its own."""


def _begin(name: str) -> None:
    """What a process does first. Ctrl-C is the driver's to hear: pebble has its processes ignore it."""
    threading.Thread(target=_end_with_driver, daemon=True).start()
    # Outside of any sample's time. What goes wrong is told by the first chunk: here it would only end the process.
    with contextlib.suppress(Exception):
        resolve_reward(name, {})


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)  # a reward may be busy for ever, and nobody waits for it


def _resolve(name: str, options: Mapping[str, Any]) -> None:
    resolve_reward(name, options)


def _score(name: str, options: Mapping[str, Any], samples: Sequence[Sample], limit: float) -> list[float | Failure]:
    """What the first samples are worth: one at least, and no new one is begun after a turn."""
    reward = resolve_reward(name, options)
    outcomes: list[float | Failure] = []
    started = time.monotonic()
    for sample in samples:
        outcomes.append(_timed(reward, sample, limit))
        if time.monotonic() - started > TURN:
            break
    return outcomes


def _timed(reward: Reward, sample: Sample, limit: float) -> float | Failure:
    """A signal ends what is Python, or waits; the driver kills the process of what is neither."""

    def end(*_: object) -> None:
        raise _TimeUp

    try:
        signal.signal(signal.SIGALRM, end)  # anew: the sample before may have set another
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            return reward.outcome(*sample)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        return _late(reward, sample, limit)
    except SystemExit as error:
        return reward.failure("died", f"ended its process (sys.exit({error.code!r}))", *sample)
    except BaseException as error:  # such as asyncio's CancelledError: it would pass for one of this process
        return reward.failure("raised", f"raised {type(error).__name__}", *sample)
