"""Sample each batch when it is wanted, and hand out its prompts one by one, for training to begin with."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from attrs import evolve

from corerl.engines.fleet import Counted
from corerl.event_loop import EventLoop
from corerl.rollout.sources.base import Arrived, BatchSampler, Scored
from corerl.rollout.sources.groups import Groups, PromptGroup
from corerl.rollout.sources.synchronous import Synchronous


class Streamed(Synchronous):
    """Sample each step on demand, with the weights that engines hold at that time, as `Synchronous` does: the samples
    are the same. But each prompt is sampled and scored by itself, and `arrived` hands it out at once."""

    streams = True

    def __init__(self, draws: BatchSampler, loop: EventLoop, *, steps: int, told: Counted | None = None) -> None:
        """`told` hears how many samples of the step are scored, and how many it has."""
        super().__init__(draws, steps=steps)
        self._loop = loop
        self._told = told
        self._ready: list[PromptGroup] = []  # of this step, in the order in which they came
        self._groups = Groups(draws, self._ready.append)
        self._begun: list[PromptGroup] = []  # of this step, by the prompt's place in it
        self._handed_out = 0  # how many of those that are ready
        self._waited = 0.0  # seconds for this step

    async def arrived(self) -> list[Arrived]:
        if self._step >= self._steps:
            return []
        await self._until(lambda: len(self._ready) > self._handed_out or self._handed_out == len(self._begun))
        fresh = self._ready[self._handed_out :]
        self._handed_out += len(fresh)
        return [Arrived(number=group.number, of=len(self._begun), scored=self._part(group)) for group in fresh]

    def _part(self, group: PromptGroup) -> Scored:
        return Scored(step=self._step, rollout=group.rollout, rewards=group.rewards, exact_match=None, seconds={})

    async def next(self) -> Scored | None:
        if self._step >= self._steps:
            return None
        await self._until(lambda: len(self._ready) == len(self._begun))
        scored = evolve(self._groups.batch(self._begun, step=self._step), seconds={"rollout": self._waited})
        self._ready.clear()
        self._begun, self._handed_out, self._waited = [], 0, 0.0
        self._step += 1
        return scored

    def _begin(self) -> None:
        draws = self._draws
        prompts = draws.stream.take(draws.prompts)
        request = draws.sampler.request(prompts, rollout_step=self._step, samples=draws.samples, params=draws.params)
        for number, prompt in enumerate(prompts):
            rows = request.take(np.arange(draws.samples) + number * draws.samples)
            self._begun.append(PromptGroup(number=number, prompt=prompt, request=rows))
            self._groups.begin(self._begun[-1])

    async def _until(self, there: Callable[[], bool]) -> None:
        """Begin the step, if it has not begun, and wait for as much of it."""
        started = time.perf_counter()
        if not self._begun:
            self._begin()
        try:
            while not there():
                self._groups.raise_failure()
                if self._told is not None:
                    samples = self._draws.samples
                    self._told(len(self._ready) * samples, len(self._begun) * samples)
                self._groups.changed.clear()
                await self._groups.changed.wait()
        finally:
            self._waited += time.perf_counter() - started

    def close(self) -> None:
        self._loop.begin(self._groups.cancel())
