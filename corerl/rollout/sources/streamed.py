"""Sample each batch when it is wanted, and hand out its prompts one by one, for training to begin with."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from attrs import define, evolve, field

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest
from corerl.engines.fleet import Counted
from corerl.errors import RewardError
from corerl.event_loop import EventLoop
from corerl.rollout.rewards.base import Scores, added
from corerl.rollout.sampler import Rollout
from corerl.rollout.sources.base import Arrived, BatchSampler, Scored
from corerl.rollout.sources.synchronous import Synchronous
from corerl.types import FloatArray


@define(kw_only=True, eq=False)
class Drawing:
    """The prompts of one step, some of which are sampled and scored."""

    step: int
    prompts: list[Prompt]
    tasks: list[asyncio.Task[None]] = field(factory=list)  # that sample them
    unscored: list[tuple[int, Rollout]] = field(factory=list)
    rollouts: dict[int, Rollout] = field(factory=dict)  # by the prompt's place in the step, as all below
    rewards: dict[int, FloatArray] = field(factory=dict)
    told: int = 0  # how many were handed out, in the order in which they came
    calls: list[Scores] = field(factory=list)  # of the reward

    def part(self, number: int) -> Scored:
        rollout, rewards = self.rollouts[number], self.rewards[number]
        return Scored(step=self.step, rollout=rollout, rewards=rewards, exact_match=None, seconds={})

    def whole(self) -> Scored:
        """Raises RewardError if every sample failed to score."""
        first = next((scores.first for scores in self.calls if scores.first), "")
        if all(scores.failed.all() for scores in self.calls):
            raise RewardError(f"{first}; all {sum(len(scores.rewards) for scores in self.calls)} samples failed")
        failures: Counter[str] = Counter()
        for scores in self.calls:
            failures.update(scores.failures)
        return evolve(
            Scored.concatenate([self.part(number) for number in range(len(self.prompts))]),
            failures=dict(failures),
            first_failure=first,
            parts=added(*(scores.parts for scores in self.calls)),
        )


class Streamed(Synchronous):
    """Sample each step on demand, with the weights that engines hold at that time, as `Synchronous` does: the samples
    are the same. But each prompt is sampled and scored by itself, and `arrived` hands it out at once."""

    streams = True

    def __init__(self, draws: BatchSampler, loop: EventLoop, *, steps: int, told: Counted | None = None) -> None:
        """`told` hears how many samples of the step are scored, and how many it has."""
        super().__init__(draws, steps=steps)
        self._loop = loop
        self._told = told
        self._now: Drawing | None = None
        self._changed = asyncio.Event()
        self._scoring: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._waited = 0.0  # seconds for this step

    async def arrived(self) -> list[Arrived]:
        if self._step >= self._steps:
            return []
        now = self._now = self._now or self._begun()
        await self._until(lambda: len(now.rewards) > now.told or now.told == len(now.prompts))
        fresh = list(now.rewards)[now.told :]
        now.told += len(fresh)
        return [Arrived(number=number, of=len(now.prompts), scored=now.part(number)) for number in fresh]

    async def next(self) -> Scored | None:
        if self._step >= self._steps:
            return None
        now = self._now = self._now or self._begun()
        await self._until(lambda: len(now.rewards) == len(now.prompts))
        scored = evolve(now.whole(), seconds={"rollout": self._waited})
        self._now, self._waited = None, 0.0
        self._step += 1
        return scored

    def _begun(self) -> Drawing:
        draws = self._draws
        now = Drawing(step=self._step, prompts=list(draws.stream.take(draws.prompts)))
        request = draws.sampler.request(
            now.prompts, rollout_step=self._step, samples=draws.samples, params=draws.params
        )
        for number, prompt in enumerate(now.prompts):
            rows = request.take(np.arange(draws.samples) + number * draws.samples)
            task = asyncio.create_task(self._draw(now, number, rows), name=f"samples of prompt {prompt.index}")
            task.add_done_callback(self._ended)
            now.tasks.append(task)
        return now

    async def _draw(self, now: Drawing, number: int, request: GenerateRequest) -> None:
        rollout = await self._draws.sampler.draw([now.prompts[number]], request, ahead=True)
        now.unscored.append((number, rollout))
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score(now))
            self._scoring.add_done_callback(self._ended)

    async def _score(self, now: Drawing) -> None:
        """Score all that is sampled; what comes meanwhile is scored together afterwards."""
        while now.unscored:
            drawn, now.unscored = now.unscored, []
            scores = await self._draws.reward.score(Rollout.concatenate([rollout for _, rollout in drawn]), part=True)
            now.calls.append(scores)
            ends = np.cumsum([len(rollout.batch) for _, rollout in drawn])[:-1]
            for (number, rollout), rewards in zip(drawn, np.split(scores.rewards, ends), strict=True):
                now.rollouts[number], now.rewards[number] = rollout, rewards
            self._changed.set()

    async def _until(self, there: Callable[[], bool]) -> None:
        started = time.perf_counter()
        try:
            while not there():
                if self._failure is not None:
                    raise self._failure
                if self._told is not None and self._now is not None:
                    samples = self._draws.samples
                    self._told(len(self._now.rewards) * samples, len(self._now.prompts) * samples)
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waited += time.perf_counter() - started

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    def close(self) -> None:
        self._loop.begin(self._cancel())

    async def _cancel(self) -> None:
        for task in [*(self._now.tasks if self._now else ()), *([self._scoring] if self._scoring else [])]:
            task.cancel()
