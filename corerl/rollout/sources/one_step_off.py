"""Sample each batch while the previous one is trained on."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.engines.fleet import NoneLeft
from corerl.rollout.sources.base import BatchSampler, Scored, Source
from corerl.rollout.sources.recorded import file_of, read_rollout, write_rollout


class OneStepOff(Source):
    """Sample the batch of step n with the weights that step n - 1 starts with: one version behind those it is trained
    with. The first batch is sampled on demand.

    Samples are therefore a function of the seed, as in a synchronous run. Checkpoints include the batch in flight,
    because they lack the weights that sampled it: a resumed run continues bit for bit like an uninterrupted one.
    """

    def __init__(self, draws: BatchSampler, ahead: BatchSampler, *, steps: int) -> None:
        """`ahead` is `draws` in a form that another thread may use while weights are trained."""
        self._draws = draws
        self._ahead = ahead
        self._steps = steps  # rollout steps in total, including those before a resume
        self._step = 0  # the next step
        self._position = draws.stream.position  # of the prompt stream where the next step begins
        self._next: Future[Scored] | None = None
        self._still = threading.Event()  # set when the batch in flight no longer needs engines
        self._still.set()

    @property
    def overlaps(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Scored]:
        return self

    def __next__(self) -> Scored:
        if self._step >= self._steps:
            raise StopIteration
        started = time.perf_counter()
        scored = self._drawn()
        waited = time.perf_counter() - started
        self._step += 1
        self._position = self._draws.stream.position
        self._next = None
        if self._step < self._steps:
            self._still.clear()
            self._next = in_background(functools.partial(self._draw_ahead, self._step), name="rollout")
            self._next.add_done_callback(lambda _: self._still.set())
        return evolve(scored, seconds={"rollout": waited})

    def _drawn(self) -> Scored:
        if self._next is not None:
            try:
                return self._next.result()
            except NoneLeft:  # new engines will have newer weights than this batch was to use
                self._draws.stream.restore(self._position)
        return self._draws.batch(self._step)

    def _draw_ahead(self, step: int) -> Scored:
        if self._ahead.refill is not None:  # what to sample next depends on the rewards so far
            return self._ahead.batch(step)
        rollout, seconds = self._ahead.sample(step)
        self._still.set()
        return self._ahead.score(step, rollout, seconds)

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Wait until the batch in flight is sampled, so that all of it comes from one version."""
        self._still.wait()
        error = self._next.exception() if self._next is not None and self._next.done() else None
        if error is not None and not isinstance(error, NoneLeft):
            raise error  # the cause, before its consequences surface
        yield

    # ---- resume -----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step and where its prompts begin; also where they end, after waiting for a batch in
        flight."""
        position = {"rollout_step": self._step, "prompts": self._position}
        return position if self._in_flight is None else {**position, "sampled": self._draws.stream.position}

    def save(self, checkpoint: Path) -> None:
        """Write the batch in flight; waits until it is scored."""
        if self._in_flight is not None:
            write_rollout(checkpoint, self._in_flight)

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """A checkpoint of another source holds no batch; then the checkpoint's own weights sample the first one."""
        self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        self._position = self._draws.stream.position
        if "sampled" in position and checkpoint is not None:
            self._next = Future()
            self._next.set_result(read_rollout(file_of(checkpoint, self._step)))
            self._draws.stream.restore(position["sampled"])

    @property
    def _in_flight(self) -> Scored | None:
        """Wait for the batch of the next step; None if there is none or it failed, which `__next__` will raise."""
        if self._next is None:
            return None
        wait([self._next])
        return None if self._next.exception() else self._next.result()


def in_background(work: Callable[[], Scored], *, name: str) -> Future[Scored]:
    """Run `work` in a daemon thread: at exit nothing must wait for it, since its engines may have ended."""
    future: Future[Scored] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
