"""Sample and score rollout steps: on demand or ahead of training, in order or as samples come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import define, evolve, field, frozen

from corerl.data.prompts import Prompt, PromptStream
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.engines.fleet import Counted, EngineFleet
from corerl.errors import CorerlError, RewardError
from corerl.rollout.recorded import file_of, read_rollout, write_rollout
from corerl.rollout.sampler import Rollout, Sampler
from corerl.rollout.scored import ScoredRollout, exact_share
from corerl.rollout.scoring import AsyncScorer, Scores, add_parts
from corerl.rollout.source import Arrived, Policies, Source
from corerl.types import BoolArray, FloatArray, IntArray


@frozen(kw_only=True)
class DynamicSampling:
    """Drop groups that teach nothing, and sample other prompts in their place."""

    useful: Callable[[FloatArray, IntArray], BoolArray]  # what decides [B], groups [B] -> [P]
    attempts: int  # replacements of a whole step; what is still missing then is filled up with dropped groups
    part: str = ""  # of the reward, which decides; "": the reward itself
    _known: set[str] = field(factory=set, init=False, eq=False)  # parts that samples have had

    def deciding(self, scores: Scores) -> FloatArray:
        """[B] what decides. Raises RewardError if no sample so far had the part."""
        self._known.update(scores.values)
        if self.part in self._known - scores.values.keys():  # other prompts, whose reward may have other parts
            return scores.rewards
        return scores.part(self.part, setting="algorithm.dynamic_sampling_on")


@define(kw_only=True, eq=False)
class PromptTask:
    """The samples of one prompt, or of all prompts of a step, from when they are requested until handed out."""

    number: int  # in starting order
    prompts: list[Prompt]
    request: GenerateRequest  # for all samples, as first issued
    ahead: bool  # whether nobody waits for them yet
    tokens: int = 0  # generated so far
    oldest: int | None = None  # the weights version that generated the oldest of them; None without any
    # Set once everything is generated:
    rollout: Rollout = field(init=False)
    seconds: float = field(init=False)
    # Set once it is scored:
    rewards: FloatArray = field(init=False)  # [B]
    failed: BoolArray = field(init=False)  # [B] True where scoring failed
    useful: BoolArray = field(init=False)  # [P] False where dynamic sampling wants another prompt
    first_failure: str = ""  # of the call that scored it

    def on_tokens(self, generation: Generation) -> None:
        if len(generation.tokens):
            oldest = int(generation.versions.min())
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)
            self.tokens += len(generation.tokens)


@define(kw_only=True, eq=False)
class SampledRollouts(Source):
    """Rollout steps that engines sample: what both orders have in common. Each `PromptTask` is sampled in an asyncio
    task; what is sampled while others are scored is scored together afterwards."""

    stream: PromptStream
    sampler: Sampler
    reward: AsyncScorer
    params: SamplingParams
    prompts: int  # per step
    samples: int  # per prompt
    refill: DynamicSampling | None = None
    engines: EngineFleet
    steps: int  # rollout steps in total, including those before a resume
    # Called with how many samples of the next step are ready, and how many it has; None where the sampler says it.
    on_progress: Counted | None = None

    tracks_versions: ClassVar[bool] = False  # whether tasks know the versions that generated their tokens

    _step: int = field(default=0, init=False)  # the next step
    _in_flight: dict[int, PromptTask] = field(factory=dict, init=False)  # by number, until handed out
    _sampling: dict[int, asyncio.Task[None]] = field(factory=dict, init=False)  # by the task's number
    _unscored: list[PromptTask] = field(factory=list, init=False)
    _scoring: asyncio.Task[None] | None = field(default=None, init=False)
    _ready: list[PromptTask] = field(factory=list, init=False)  # scored
    _failure: BaseException | None = field(default=None, init=False)
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
        """Start what is to be sampled by now."""

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
        """Start what is to be sampled by now, and wait for as much of it."""
        started = time.perf_counter()
        try:
            while True:
                self._raise_failure()
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
        """Wait, or until a task fails."""
        while self._failure is None and not done():
            self._changed.clear()
            await self._changed.wait()

    def _raise_failure(self) -> None:
        """Raise the error of a failed task, before its consequences surface instead."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self.engines.loop.begin(self._cancel())

    async def _cancel(self) -> None:
        for task in [*self._sampling.values(), *([self._scoring] if self._scoring else [])]:
            task.cancel()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def _request(self, prompts: list[Prompt], *, attempt: int) -> GenerateRequest:
        return self.sampler.request(
            prompts, rollout_step=self._step, samples=self.samples, params=self.params, attempt=attempt
        )

    def _begin(self, task: PromptTask) -> None:
        self._in_flight[task.number] = task
        name = f"samples of prompt {task.prompts[0].index}"
        self._sampling[task.number] = asyncio.create_task(self._sample(task), name=name)
        self._sampling[task.number].add_done_callback(self._ended)

    async def _sample(self, task: PromptTask) -> None:
        started = time.perf_counter()
        on_tokens = task.on_tokens if self.tracks_versions else None
        task.rollout = await self.sampler.answer(task.prompts, task.request, ahead=task.ahead, on_tokens=on_tokens)
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
            scores = await self.reward.score(Rollout.concatenate([task.rollout for task in tasks]), part=True)
            self._scores.append(scores)
            deciding = scores.rewards if self.refill is None else self.refill.deciding(scores)
            ends = np.cumsum([len(task.rollout.batch) for task in tasks])[:-1]
            split = (np.split(each, ends) for each in (scores.rewards, scores.failed, deciding))
            for task, rewards, failed, decides in zip(tasks, *split, strict=True):
                task.rewards, task.failed, task.first_failure = rewards, failed, scores.first
                task.useful = np.ones(len(task.prompts), np.bool_)
                if self.refill is not None:
                    task.useful = self.refill.useful(decides, task.rollout.batch.row_columns["group"])
                if task in self._in_flight.values():  # else it was given up meanwhile
                    self._keep(task)
            self._changed.set()

    def _give_up(self, task: PromptTask) -> None:
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
        RewardError if every sample failed to score."""
        first = next((scores.first for scores in self._scores if scores.first), "")
        if all(task.failed.all() for task in tasks):
            why = next((task.first_failure for task in tasks if task.first_failure), first)
            count = sum(len(task.request) for task in tasks)
            raise RewardError(why + (f"; all {count} samples failed" if count > 1 else ""))
        rollout = Rollout.concatenate([task.rollout for task in tasks])
        scored = ScoredRollout(
            step=self._step,
            rollout=rollout,
            rewards=np.concatenate([task.rewards for task in tasks]),
            exact_match=exact_share(rollout),
            seconds=seconds or {},
            failures=dict(sum((Counter(scores.failures) for scores in self._scores), Counter[str]())),
            first_failure=first,
            counts=counts,
            parts=add_parts(*(scores.parts for scores in self._scores)),
        )
        for task in tasks:
            self._in_flight.pop(task.number, None)
        self._scores = []
        return scored


@define(kw_only=True, eq=False)
class OrderedRollouts(SampledRollouts):
    """Step n consists of the n-th prompts of the stream, whose samples are a function of the seed and of the weights:
    those that engines hold when the step is wanted or, with `ahead`, when the step before is handed out.

    With `ahead` an update waits until all tokens of the next step are there, from one version. Checkpoints include that
    step, because they lack the weights that sampled it. If all engines die, it is given up, and sampled on demand by
    those that replace them.
    """

    ahead: bool = False  # sample the next step while one is trained on
    singly: bool = False  # each prompt is sampled and scored by itself

    _begins: dict[str, Any] = field(factory=dict, init=False)  # where the prompts in flight begin
    _complete: ScoredRollout | None = field(default=None, init=False)  # the next step, of a checkpoint or for one
    _arrived: int = field(default=0, init=False)  # how many of the ready tasks `arrived` has handed out

    @property
    def overlaps(self) -> bool:
        return self.ahead

    async def next(self) -> ScoredRollout | None:
        scored = await super().next()
        if self.ahead and self._step < self.steps:
            try:
                self._start_step(ahead=True)
            except CorerlError as error:  # of one of its prompts: this step can be trained on all the same
                self._failure = self._failure or error
                self.stream.restore(self._begins)
        return scored

    async def arrived(self) -> Arrived | None:
        if not self.singly or self._step >= self.steps:
            return None
        await self._until(lambda: len(self._ready) > self._arrived or self._arrived == len(self._in_flight))
        fresh = self._ready[self._arrived :]
        self._arrived += len(fresh)
        if not fresh:
            return None
        return Arrived(
            prompts=np.array([task.number for task in fresh]),
            of=len(self._in_flight),
            batch=Rollout.concatenate([task.rollout for task in fresh]).batch,
            rewards=np.concatenate([task.rewards for task in fresh]),
        )

    def _start(self) -> None:
        if not self._in_flight and self._complete is None:
            self._start_step(ahead=self.singly)

    def _start_step(self, *, ahead: bool, attempt: int = 0) -> None:
        if not attempt:
            self._begins = self.stream.position
        prompts = self.stream.take(self.prompts)
        request = self._request(prompts, attempt=attempt)
        if not self.singly:
            self._begin(PromptTask(number=attempt, prompts=prompts, request=request, ahead=ahead))
            return
        for number, prompt in enumerate(prompts):
            rows = request.take_rows(np.arange(self.samples) + number * self.samples)
            self._begin(PromptTask(number=number, prompts=[prompt], request=rows, ahead=ahead))

    def _keep(self, task: PromptTask) -> None:
        self._ready.append(task)
        if self.refill is not None:
            useful = sum(int(each.useful.sum()) for each in self._ready)
            if useful < self.prompts and len(self._ready) <= self.refill.attempts:
                self._start_step(ahead=task.ahead, attempt=len(self._ready))

    def _enough(self) -> bool:
        return self._complete is not None or len(self._ready) == len(self._in_flight)

    def _hand_out(self) -> ScoredRollout:
        if self._complete is not None:
            scored, self._complete = self._complete, None
            return scored
        tasks = sorted(self._ready, key=lambda task: task.number)
        sampling = sum(task.seconds for task in tasks)
        on_demand = {"rollout": sampling, "reward": self._waited - sampling}
        useful = np.concatenate([task.useful for task in tasks])
        scored = self._step_of(
            tasks,
            seconds=None if self.ahead or self.singly else on_demand,
            counts={} if self.refill is None else self._counts(len(tasks), useful),
        )
        if self.refill is not None:
            scored = scored.take_prompts(np.argsort(~useful, kind="stable")[: self.prompts])
        self._ready, self._arrived = [], 0
        return scored

    def _counts(self, attempts: int, useful: BoolArray) -> dict[str, int]:
        """Groups that were generated, and not handed out."""
        count = int(useful.sum())
        return {
            "attempts": attempts,
            "groups_set_aside": len(useful) - count,
            "groups_unused": max(count - self.prompts, 0),
            "groups_missing": max(self.prompts - count, 0),
        }

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, policies: Policies) -> Iterator[None]:
        if self.ahead:
            self.engines.loop.run(self._end_sampling())
        yield
        if self.ahead:
            self.engines.loop.run(self._begin_again())

    async def _begin_again(self) -> None:
        self._changed.set()  # for a `next` that waits for a step that was given up

    async def _end_sampling(self) -> None:
        """Wait until what is in flight needs no engine any more, also not for other prompts."""
        self._raise_failure()
        sampled = self._wait(lambda: not self._sampling and (self.refill is None or self._enough()))
        if not await self.engines.until(sampled):  # no engine is left
            for task in [*self._in_flight.values()]:
                self._give_up(task)
            self._ready, self._scores = [], []
            self.stream.restore(self._begins)
        self._raise_failure()

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step and where its prompts begin, after waiting for a step that is sampled ahead: then also
        where they end."""
        if self._step_ahead() is not None:
            return {"rollout_step": self._step, "prompts": self._begins, "sampled": self.stream.position}
        return {"rollout_step": self._step, "prompts": self._begins if self._in_flight else self.stream.position}

    def _step_ahead(self) -> ScoredRollout | None:
        """The step that is sampled ahead, once it is complete; None if there is none, if it failed, which `next` will
        raise, or if no engine is left to sample it."""
        if self._complete is None and self.ahead and self._in_flight:
            with contextlib.suppress(CorerlError):
                self._complete = self.engines.loop.run(self._completed())
        return self._complete

    async def _completed(self) -> ScoredRollout | None:
        complete = self._enough() or await self.engines.until(self._wait(self._enough))
        return self._hand_out() if complete and self._failure is None else None

    def save(self, checkpoint: Path) -> None:
        """Write the step that is sampled ahead; waits until it is scored."""
        if (ahead := self._step_ahead()) is not None:
            write_rollout(checkpoint, ahead)

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """A checkpoint of another kind of source has no step that was sampled ahead, and one of other data none to
        train on; then its weights sample the first one."""
        same_data = self.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        if self.ahead and same_data and "sampled" in position and checkpoint is not None:
            self._begins = self.stream.position
            self._complete = read_rollout(file_of(checkpoint, self._step))
            self.stream.restore(position["sampled"])

    def renumber(self, updates: int) -> None:
        if self._complete is not None:
            batch = self._complete.rollout.batch
            batch = batch.with_columns(versions=batch.columns["versions"] + updates)
            self._complete = evolve(self._complete, rollout=evolve(self._complete.rollout, batch=batch))


@define(kw_only=True, eq=False)
class AsynchronousRollouts(SampledRollouts):
    """Prompts are sampled continuously, and a step is made of those that are finished first, the oldest first.

    An update interrupts the engines; unfinished responses continue under the new weights, and each token keeps the
    version and log-prob of the weights that generated it. An episode may span several versions too; its function keeps
    running meanwhile. A sample is only handed out if its oldest token is at most `max_staleness` versions behind the
    weights it will be trained with: a prompt that misses this is returned, and sampled again with other noise. At most
    max_staleness + 1 steps of prompts are in flight, as more could not be trained on in time. A resumed run restarts
    the prompts that were in flight and loses nothing else. Such runs are not repeatable, because engines race with the
    training ranks.
    """

    max_staleness: int  # weight updates between a sample and its training
    waits: bool = False  # for samples that would become too old, instead of handing out others first

    tracks_versions: ClassVar[bool] = True

    _started: int = field(default=0, init=False)  # tasks in total
    _policies: Policies = field(factory=Policies, init=False)  # the next step will be trained with the last
    _set_aside: list[PromptTask] = field(factory=list, init=False)  # not useful; used if too few others are
    # Since the last step was handed out:
    _useless: int = field(default=0, init=False)  # tasks that were set aside
    _stale_samples: int = field(default=0, init=False)
    _stale_tokens: int = field(default=0, init=False)

    @property
    def overlaps(self) -> bool:
        return True

    def _start(self) -> None:
        """Start prompts for the next step and those after it: of one more step if engines keep up, so that samples stay
        fresh; as many as can be trained on in time if they do not."""
        self._drop_stale()
        ahead = 1 if len(self._ready) >= self.prompts else self.max_staleness
        while len(self._in_flight) < min(1 + ahead, self.steps - self._step) * self.prompts:
            prompts = self.stream.take(1)
            request = self._request(prompts, attempt=self._started)  # no two groups of a run share noise
            self._begin(PromptTask(number=self._started, prompts=prompts, request=request, ahead=True))
            self._started += 1

    def _keep(self, task: PromptTask) -> None:
        if task.useful.all():
            self._ready.append(task)
            return
        self._set_aside.append(task)
        self._useless += 1
        del self._in_flight[task.number]  # another one is started in its place

    def _enough(self) -> bool:
        """Tasks that were set aside count once the allowed number of replacements is used up."""
        ready = len(self._ready)
        if self.refill is not None and self._useless + ready >= (1 + self.refill.attempts) * self.prompts:
            ready += len(self._set_aside)
        return ready >= self.prompts and (not self.waits or self._others_in_time)

    @property
    def _others_in_time(self) -> bool:
        """Whether all tasks that are not ready can still be trained on in time, after those that would be handed out
        now: oldest first, one step for each version. They can once the oldest of all are ready."""
        self._ready.sort(key=self._age)
        chosen = {task.number for task in self._ready[: self.prompts]}
        ready = {task.number for task in self._ready}
        others = sorted((task for task in self._in_flight.values() if task.number not in chosen), key=self._age)
        return all(
            self._age(task)[0] + self.max_staleness > self._policies.newest + place // self.prompts
            for place, task in enumerate(others)
            if task.number not in ready  # waiting for these would change nothing
        )

    def _age(self, task: PromptTask) -> tuple[int, int]:
        """What tasks are handed out by, lowest first. One without tokens does not age: none has come yet, or its
        function failed at once."""
        policies = self._policies
        return policies.newest if task.oldest is None else int(policies.of(np.array(task.oldest))), task.number

    def _hand_out(self) -> ScoredRollout:
        self._ready.sort(key=self._age)
        tasks = self._ready[: self.prompts]
        tasks += self._set_aside[: self.prompts - len(tasks)]
        counts = {"stale_samples": self._stale_samples, "stale_tokens": self._stale_tokens}
        if self.refill is not None:
            useful = sum(int(task.useful.sum()) for task in tasks)
            counts |= {"groups_set_aside": self._useless, "groups_missing": self.prompts - useful}
        scored = self._step_of(tasks, counts=counts)
        self._ready = self._ready[self.prompts :]
        self._set_aside = []
        self._useless = self._stale_samples = self._stale_tokens = 0
        return scored

    def _drop_stale(self) -> None:
        """Discard every task that is too stale to train on, and return its prompt to the stream."""
        for task in [each for each in self._in_flight.values() if not self._fresh(each)]:
            self._give_up(task)
            self.stream.give_back(task.prompts[0])
            self._stale_samples += len(task.request)
            self._stale_tokens += task.tokens
        self._ready = [task for task in self._ready if self._fresh(task)]
        self._set_aside = [task for task in self._set_aside if self._fresh(task)]

    def _fresh(self, task: PromptTask) -> bool:
        return self._age(task)[0] + self.max_staleness >= self._policies.newest

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, policies: Policies) -> Iterator[None]:
        self.engines.loop.run(self._pause())
        yield
        self.engines.loop.run(self._resume(policies))

    async def _pause(self) -> None:
        self._raise_failure()
        if self._started:
            await self.engines.pause()
        self._raise_failure()

    async def _resume(self, policies: Policies) -> None:
        self._policies = policies
        self._drop_stale()
        if self._started:
            await self.engines.resume()
        self._changed.set()

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step and where its prompts begin if those in flight are returned, and how many tasks were
        started, so that no later one reuses their noise."""
        return self.engines.loop.run(self._position())

    async def _position(self) -> dict[str, Any]:
        prompts = self.stream.position_without(task.prompts[0] for task in self._in_flight.values())
        return {"rollout_step": self._step, "prompts": prompts, "begun": self._started}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self.stream.restore(position["prompts"])
        self._step, self._started = position["rollout_step"], position.get("begun", 0)
