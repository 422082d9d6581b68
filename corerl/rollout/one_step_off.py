"""Batches of which each is sampled while the one before it is trained on."""

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

from corerl.rollout.fleet import NoneLeft
from corerl.rollout.saved import file_of, read_rollout, write_rollout
from corerl.rollout.sources import Draws, Scored, Source


class OneStepOff(Source):
    """The batch of step n is drawn by the weights that step n - 1 begins with: one version behind those that it is
    trained with. That of the first step is drawn when it is asked for.

    So what is drawn is a function of the seed, as of a synchronous run. The batch in flight is a part of a checkpoint,
    since the weights that drew it are not: a resumed run goes on as an uninterrupted one, bit for bit.
    """

    def __init__(self, draws: Draws, ahead: Draws, *, steps: int) -> None:
        """`ahead` is `draws` as another thread may use it, while weights are trained."""
        self._draws = draws
        self._ahead = ahead
        self._steps = steps  # rollout steps in all, those before a resume included
        self._step = 0  # the next one
        self._position = draws.stream.position  # of the prompts where the next step begins
        self._next: Future[Scored] | None = None
        self._still = threading.Event()  # the batch in flight needs no engine any more
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
            except NoneLeft:  # no engine is left, and new ones have newer weights than those that were to draw
                self._draws.stream.restore(self._position)
        return self._draws.batch(self._step)

    def _draw_ahead(self, step: int) -> Scored:
        if self._ahead.refill is not None:  # what is sampled depends on what the samples before are worth
            return self._ahead.batch(step)
        rollout, seconds = self._ahead.sample(step)
        self._still.set()
        return self._ahead.score(step, rollout, seconds)

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Waits until the batch in flight is sampled, so that one version has drawn all of it."""
        self._still.wait()
        error = self._next.exception() if self._next is not None and self._next.done() else None
        if error is not None and not isinstance(error, NoneLeft):
            raise error  # the cause, before what follows from it is met here
        yield

    # ---- resume -----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step and where its prompts begin; once the batch in flight is there, also where they end."""
        position = {"rollout_step": self._step, "prompts": self._position}
        return position if self._in_flight is None else {**position, "sampled": self._draws.stream.position}

    def save(self, checkpoint: Path) -> None:
        """The batch in flight; waits until it is scored."""
        if self._in_flight is not None:
            write_rollout(checkpoint, self._in_flight)

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """Where the checkpoint holds no batch, being another source's, its own weights draw the first one."""
        self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        self._position = self._draws.stream.position
        if "sampled" in position and checkpoint is not None:
            self._next = Future()
            self._next.set_result(read_rollout(file_of(checkpoint, self._step)))
            self._draws.stream.restore(position["sampled"])

    @property
    def _in_flight(self) -> Scored | None:
        """What is sampled for the next step; None where there is none, or it has failed, as its step will tell."""
        if self._next is None:
            return None
        wait([self._next])
        return None if self._next.exception() else self._next.result()


def in_background(work: Callable[[], Scored], *, name: str) -> Future[Scored]:
    """Do `work` in a thread for which no one waits at the end of the program: its engines may have ended."""
    future: Future[Scored] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
