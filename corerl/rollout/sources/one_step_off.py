"""Sample each batch while the previous one is trained on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.engines.fleet import EngineFleet
from corerl.rollout.sources.base import BatchSampler, Scored, Source
from corerl.rollout.sources.recorded import file_of, read_rollout, write_rollout


class OneStepOff(Source):
    """Sample the batch of step n with the weights that step n - 1 starts with: one version behind those it is trained
    with. The first batch is sampled on demand.

    Samples are therefore a function of the seed, as in a synchronous run. Checkpoints include the batch in flight,
    because they lack the weights that sampled it: a resumed run continues bit for bit like an uninterrupted one. If all
    engines die, it is given up and sampled on demand by those that follow, whose weights are newer than it was to use.
    """

    overlaps = True

    def __init__(self, draws: BatchSampler, engines: EngineFleet, *, steps: int) -> None:
        self._draws = draws
        self._engines = engines
        self._steps = steps  # rollout steps in total, including those before a resume
        self._step = 0  # the next step
        self._position = draws.stream.position  # of the prompt stream where the next step begins
        self._next: asyncio.Task[Scored] | None = None  # the batch in flight
        self._read: Scored | None = None  # that of a checkpoint
        self._still = asyncio.Event()  # set when the batch in flight no longer needs engines

    async def next(self) -> Scored | None:
        if self._step >= self._steps:
            return None
        started = time.perf_counter()
        scored = await self._drawn()
        waited = time.perf_counter() - started
        self._step += 1
        self._position = self._draws.stream.position
        self._next = self._read = None
        if self._step < self._steps:
            self._still.clear()
            self._next = asyncio.ensure_future(self._draw_ahead(self._step))
            self._next.add_done_callback(lambda _: self._still.set())
        return evolve(scored, seconds={"rollout": waited})

    async def _drawn(self) -> Scored:
        if self._read is not None:
            return self._read
        if self._next is not None:
            await asyncio.wait([self._next])
            if not self._next.cancelled():
                return self._next.result()
            self._draws.stream.restore(self._position)
        return await self._draws.batch(self._step)

    async def _draw_ahead(self, step: int) -> Scored:
        if self._draws.refill is not None:  # what to sample next depends on the rewards so far
            return await self._draws.batch(step)
        rollout, seconds = await self._draws.sample(step, ahead=True)
        self._still.set()
        return await self._draws.score(step, rollout, seconds)

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Wait until the batch in flight is sampled, so that all of it comes from one version."""
        self._engines.loop.run(self._stilled())
        yield

    async def _stilled(self) -> None:
        if self._next is None:
            return
        if not await self._engines.until(self._still.wait()):
            self._next.cancel()
            await asyncio.wait([self._next])
        elif self._next.done() and not self._next.cancelled() and (error := self._next.exception()) is not None:
            raise error  # the cause, before its consequences surface

    # ---- resume -----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step and where its prompts begin; also where they end, after waiting for a batch in
        flight."""
        position = {"rollout_step": self._step, "prompts": self._position}
        in_flight = self._engines.loop.run(self._in_flight())
        return position if in_flight is None else {**position, "sampled": self._draws.stream.position}

    def save(self, checkpoint: Path) -> None:
        """Write the batch in flight; waits until it is scored."""
        if (in_flight := self._engines.loop.run(self._in_flight())) is not None:
            write_rollout(checkpoint, in_flight)

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """A checkpoint of another kind of source has no batch, and one of other data none to train on; then its weights
        sample the first batch."""
        goes_on = self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        self._position = self._draws.stream.position
        if goes_on and "sampled" in position and checkpoint is not None:
            self._read = read_rollout(file_of(checkpoint, self._step))
            self._draws.stream.restore(position["sampled"])

    def renumber(self, updates: int) -> None:
        if self._read is not None:
            batch = self._read.rollout.batch
            batch = batch.with_columns(versions=batch.columns["versions"] + updates)
            self._read = evolve(self._read, rollout=evolve(self._read.rollout, batch=batch))

    async def _in_flight(self) -> Scored | None:
        """Wait for the batch of the next step; None if there is none or it failed, which `next` will raise, or if no
        engine is left to sample it."""
        if self._read is not None or self._next is None:
            return self._read
        if not self._next.done() and not await self._engines.until(asyncio.wait([self._next])):
            return None
        return None if self._next.cancelled() or self._next.exception() else self._next.result()

    def close(self) -> None:
        if self._next is not None:
            self._engines.loop.begin(_cancelled(self._next))


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
