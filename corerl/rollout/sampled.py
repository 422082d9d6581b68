"""Rollout steps that engines sample: what the schedules in `ordered` and `asynchronous` share."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
from attrs import define, evolve, field, frozen

from corerl.data.prompts import Prompt, PromptStream
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.engines.fleet import EngineFleet
from corerl.errors import RewardError
from corerl.rollout.sampler import Rollout, Sampler
from corerl.rollout.scored import ScoredRollout, exact_fraction
from corerl.rollout.scoring import AsyncScorer, Scores
from corerl.rollout.source import Source
from corerl.types import BoolArray, FloatArray, IntArray, OnProgress


@frozen(kw_only=True)
class DynamicSampling:
    """Drop groups that teach nothing, and sample other prompts in their place (Yu et al. 2025, "DAPO")."""

    useful: Callable[[FloatArray, IntArray], BoolArray]  # what decides [B], peers [B] -> by their numbers
    max_replacements: int  # of a whole step; groups that are still missing then are filled up with dropped ones
    part: str = ""  # of the reward, which decides; "": the reward itself
    known: bool = False  # whether samples are known to have the part, by an earlier step or a checkpoint's config

    def deciding(self, scores: Scores) -> FloatArray:
        """[B] what decides: of samples without the part, whose prompts' rewards may have others, it is the reward."""
        return self.require_part(scores) if self.part in scores.values else scores.rewards

    def require_part(self, scores: Scores) -> FloatArray:
        """[B] what decides. Raises RewardError if no sample has the part."""
        return scores.part(self.part, setting="algorithm.dynamic_sampling_on")


@define(kw_only=True, eq=False)
class PromptTask:
    """The samples of one prompt, or of all prompts of a step, from when they are requested until handed out."""

    number: int  # in starting order
    prompts: list[Prompt]
    request: GenerateRequest  # for all samples, as first issued
    background: bool  # whether requests of what a step waits for overtake it
    tokens: int = 0  # generated so far
    oldest: int | None = None  # the weights version that generated the oldest of them; None without any
    # Set once all its samples are generated:
    rollout: Rollout = field(init=False)
    seconds: float = field(init=False)
    # Set once it is scored:
    scores: Scores = field(init=False)  # whose failures and parts are of all that was scored with it
    useful: BoolArray = field(init=False)  # [P] False where dynamic sampling wants another prompt

    def on_tokens(self, generation: Generation) -> None:
        if len(generation.tokens):
            oldest = int(generation.versions.min())
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)
            self.tokens += len(generation.tokens)


@define(kw_only=True, eq=False)
class SampledRollouts(Source):
    """Rollout steps that engines sample: what all schedules have in common. Each `PromptTask` is sampled in an asyncio
    task; what is sampled while others are scored is scored together afterwards.

    `next` waits in `_until` for enough tasks. That calls `_start`, where a schedule takes prompts from the stream and
    calls `_begin` for each task; `_sample` has engines generate it, `_score` scores it, and the schedule's `_keep`
    looks at it. When enough are ready, its `_hand_out` makes a rollout step of them.
    """

    stream: PromptStream
    sampler: Sampler
    reward: AsyncScorer
    params: SamplingParams
    prompts: int  # per step
    samples: int  # per prompt
    dynamic_sampling: DynamicSampling | None = None
    engines: EngineFleet
    steps: int  # rollout steps in total, including those before a resume
    # Called with how many samples of the next step are ready, and how many it has; None where the sampler reports it.
    on_progress: OnProgress | None = None

    tracks_versions: ClassVar[bool] = False  # whether tasks know the versions that generated their tokens

    _step: int = field(default=0, init=False)  # the next step
    _in_flight: dict[int, PromptTask] = field(factory=dict, init=False)  # by number, until handed out
    _sampling: dict[int, asyncio.Task[None]] = field(factory=dict, init=False)  # by the task's number
    _unscored: list[PromptTask] = field(factory=list, init=False)
    _scoring: asyncio.Task[None] | None = field(default=None, init=False)
    _ready: list[PromptTask] = field(factory=list, init=False)  # scored
    _failure: BaseException | None = field(default=None, init=False)  # of a task; `next` raises it
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)  # set when tasks were sampled, scored or failed
    # Since the last step was handed out:
    _scores: list[Scores] = field(factory=list, init=False)
    _waited: float = field(default=0.0, init=False)  # seconds

    async def next(self) -> ScoredRollout | None:
        if self._step >= self.steps:
            return None
        await self._until(self._enough)
        scored = self._hand_out()
        seconds = scored.seconds or {"rollout": self._waited}
        self._waited = 0.0
        self._step += 1
        return evolve(scored, seconds=seconds)

    @abstractmethod
    def _start(self) -> None:
        """Start the tasks that are due."""

    @abstractmethod
    def _keep(self, task: PromptTask) -> None:
        """Add a scored task to the ready ones; where too few prompts are useful, others are sampled."""

    @abstractmethod
    def _enough(self) -> bool:
        """Whether a step is ready."""

    @abstractmethod
    def _hand_out(self) -> ScoredRollout:
        """Make a step of what is ready. Raises RewardError if every sample failed to score."""

    async def _until(self, done: Callable[[], bool]) -> None:
        """Start the tasks that are due, and wait until `done`."""
        started = time.perf_counter()
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._start()  # before handing out: what starts now is sampled while this step is trained on
                if done():
                    return
                if self.on_progress is not None:
                    ready = min(len(self._ready), self.prompts)
                    self.on_progress(ready * self.samples, self.prompts * self.samples)
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waited += time.perf_counter() - started

    async def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, or until a task fails."""
        while self._failure is None and not done():
            self._changed.clear()
            await self._changed.wait()

    def _require_engines(self) -> None:
        """Raise the error that has ended all engines, before its consequences surface in an update. Another failure is
        left to `next`, which comes once the step before is saved: that can be trained on all the same."""
        if self.engines.failure is not None:
            raise self.engines.failure

    def close(self) -> None:
        self.engines.loop.begin(self._cancel())

    async def _cancel(self) -> None:
        for task in [*self._sampling.values(), *([self._scoring] if self._scoring else [])]:
            task.cancel()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def _request(self, prompts: list[Prompt], *, noise_salt: int) -> GenerateRequest:
        return self.sampler.request(
            prompts, rollout_step=self._step, samples=self.samples, params=self.params, noise_salt=noise_salt
        )

    def _begin(self, task: PromptTask) -> None:
        self._in_flight[task.number] = task
        name = f"samples of prompt {task.prompts[0].index}"
        self._sampling[task.number] = asyncio.create_task(self._sample(task), name=name)
        self._sampling[task.number].add_done_callback(self._ended)

    async def _sample(self, task: PromptTask) -> None:
        started = time.perf_counter()
        on_tokens = task.on_tokens if self.tracks_versions else None
        task.rollout = await self.sampler.checked_generate(
            task.prompts, task.request, background=task.background, on_tokens=on_tokens
        )
        task.seconds = time.perf_counter() - started
        del self._sampling[task.number]
        self._unscored.append(task)
        self._changed.set()
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score())
            self._scoring.add_done_callback(self._ended)

    async def _score(self) -> None:
        while self._unscored:
            tasks, self._unscored = self._unscored, []
            scores = await self.reward.score(Rollout.concatenate([task.rollout for task in tasks]), partial=True)
            self._scores.append(scores)
            deciding = scores.rewards if self.dynamic_sampling is None else self.dynamic_sampling.deciding(scores)
            ends = np.cumsum([len(task.rollout.batch) for task in tasks])[:-1]
            for task, rows in zip(tasks, np.split(np.arange(len(scores.rewards)), ends), strict=True):
                task.scores, task.useful = scores.take_rows(rows), np.ones(len(task.prompts), np.bool_)
                if self.dynamic_sampling is not None:
                    group, peers = task.rollout.batch.row_columns["group"], task.rollout.batch.peers
                    teaches = self.dynamic_sampling.useful(deciding[rows], peers)[peers]
                    task.useful = np.bincount(group, weights=teaches) > 0  # in one of its roles
                if self._in_flight.get(task.number) is task:  # else it was discarded meanwhile
                    self._keep(task)
            self._changed.set()

    def _discard(self, task: PromptTask) -> None:
        """Sample and score it no more; if it is being scored already, nobody gets it."""
        del self._in_flight[task.number]
        if (sampling := self._sampling.pop(task.number, None)) is not None:
            sampling.cancel()
        self._unscored = [each for each in self._unscored if each is not task]

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    def _step_of(
        self, tasks: list[PromptTask], *, counts: Mapping[str, int], seconds: Mapping[str, float] | None = None
    ) -> ScoredRollout:
        """The step that these tasks make; its failures and parts are of all that was scored since the last one. Raises
        RewardError if every sample failed to score, or if none has the part that decides dynamic sampling."""
        every, of_step = Scores.joined(self._scores), Scores.joined([task.scores for task in tasks])
        if of_step.failed.all():
            count = sum(len(task.request) for task in tasks)
            raise RewardError((of_step.first or every.first) + (f"; all {count} samples failed" if count > 1 else ""))
        # Of the first step with this part alone: by chance a later one has only prompts without it.
        if self.dynamic_sampling is not None and not self.dynamic_sampling.known:
            self.dynamic_sampling.require_part(every)
            self.dynamic_sampling = evolve(self.dynamic_sampling, known=True)
        rollout = Rollout.concatenate([task.rollout for task in tasks])
        scored = ScoredRollout(
            step=self._step,
            rollout=rollout,
            rewards=of_step.rewards,
            exact_match=exact_fraction(rollout),
            seconds=seconds or {},
            failures=every.failures,
            first_failure=every.first,
            counts=counts,
            parts=every.parts,
            values=of_step.values,
        )
        for task in tasks:
            self._in_flight.pop(task.number, None)
        self._scores = []
        return scored
