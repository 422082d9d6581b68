"""Build batches from whichever samples finish first, while engines generate continuously and weights change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve, field

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.fleet import Counted, EngineFleet
from corerl.errors import RewardError
from corerl.rollout.rewards.base import PartSums, Scores, added
from corerl.rollout.sampler import Rollout
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Scored, Source, exact_share
from corerl.types import BoolArray, FloatArray


@define(kw_only=True, eq=False)
class PromptGroup:
    """The samples of one prompt, from when they are started until they are handed out."""

    number: int  # in starting order
    prompt: Prompt
    request: GenerateRequest  # for all samples, as first issued
    tokens: int = 0  # sampled so far
    oldest: int | None = None  # the weights version that sampled the oldest of them
    # Set once everything is sampled and scored:
    rollout: Rollout | None = None
    rewards: FloatArray = field(factory=lambda: np.zeros(0, np.float32))  # [G]
    failed: BoolArray = field(factory=lambda: np.zeros(0, np.bool_))  # [G] True where scoring failed
    first_failure: str = ""  # of the call that scored the group

    def drew(self, generation: Generation) -> None:
        if len(generation.tokens):
            oldest = int(generation.versions.min())
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)
            self.tokens += len(generation.tokens)


@define(kw_only=True)
class Tally:
    """Counts of discarded and failed samples since the last batch was handed out."""

    stale_samples: int = 0  # discarded
    stale_tokens: int = 0
    zero_variance: int = 0  # groups without spread in their rewards
    failures: Counter[str] = field(factory=Counter)  # failed samples by kind, among those scored since then
    first_failure: str = ""
    parts: PartSums = field(factory=dict)

    def give_up(self, group: PromptGroup) -> None:
        self.stale_samples += len(group.request)
        self.stale_tokens += group.tokens

    def score(self, scores: Scores) -> None:
        self.failures.update(scores.failures)
        self.first_failure = self.first_failure or scores.first
        self.parts = added(self.parts, scores.parts)

    def batch(self, step: int, groups: Sequence[PromptGroup], refill: DynamicSampling | None) -> Scored:
        """Make `groups` the batch of rollout step `step`. Raises RewardError if every sample failed to score."""
        if all(group.failed.all() for group in groups):
            samples = sum(len(group.request) for group in groups)
            first = next((group.first_failure for group in groups if group.first_failure), self.first_failure)
            raise RewardError(f"{first}; all {samples} samples failed")
        rollout = Rollout.concatenate([group.rollout for group in groups if group.rollout is not None])
        rewards = np.concatenate([group.rewards for group in groups])
        counts = {"stale_samples": self.stale_samples, "stale_tokens": self.stale_tokens}
        if refill is not None:
            missing = len(groups) - int(refill.useful(rewards, rollout.batch.rows["group"]).sum())
            counts |= {"groups_set_aside": self.zero_variance, "groups_missing": missing}
        return Scored(
            step=step,
            rollout=rollout,
            rewards=rewards,
            exact_match=exact_share(rollout),
            seconds={},
            failures=dict(self.failures),
            first_failure=self.first_failure,
            counts=counts,
            parts=self.parts,
        )


class Asynchronous(Source):
    """Sample continuously while weights are trained. A weight update interrupts the engines; unfinished responses
    continue under the new weights, and each token keeps the version and log-prob of the weights that sampled it.

    A sample is only handed out if its oldest token is at most `max_staleness` versions behind the weights it will be
    trained with. Once any sample of a prompt misses that, the prompt is returned and resampled with other noise; if the
    source `waits`, none does, unless an update has to be repeated.

    An episode may span several versions too: an update between two turns, or during one, discards nothing that was
    said, and the episode's function keeps running meanwhile.

    At most max_staleness + 1 batches of prompts are in flight: more could not all be trained on in time. The oldest
    finished groups are handed out first. A resumed run restarts the prompts that were in flight and loses nothing
    else. Runs are not repeatable, because the engines race with the training ranks.

    Each group is a task; one that is given up is cancelled.
    """

    overlaps = True

    def __init__(
        self,
        draws: BatchSampler,
        engines: EngineFleet,
        *,
        steps: int,
        max_staleness: int,
        waits: bool = False,
        told: Counted | None = None,
    ) -> None:
        """`waits`: for samples that would become too old, instead of handing out others first. `told` hears how many
        samples of the next batch are ready, and how many it has."""
        self._told = told
        self._draws = draws
        self._engines = engines
        self._steps = steps  # rollout steps in total, including those before a resume
        self._max_staleness = max_staleness
        self._waits = waits
        self._step = 0  # the next step
        self._begun = 0  # groups started in total
        self._version = 0  # of the weights that the next batch will be trained with

        self._changed = asyncio.Event()
        self._groups: dict[int, PromptGroup] = {}  # in flight, by number
        self._tasks: dict[int, asyncio.Task[None]] = {}  # that sample them
        self._unscored: list[tuple[PromptGroup, Rollout]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._ready: list[PromptGroup] = []
        self._set_aside: list[PromptGroup] = []  # without spread; used only if too few groups have any
        self._failure: BaseException | None = None
        self._tally = Tally()

    async def next(self) -> Scored | None:
        if self._step >= self._steps:
            return None
        started = time.perf_counter()
        while True:
            self._raise_failure()
            self._give_up_stale()
            self._begin()  # before handing out: what starts now is sampled while this batch is trained on
            if self._enough:
                break
            if self._told is not None:
                wanted = self._draws.prompts
                self._told(min(len(self._ready), wanted) * self._draws.samples, wanted * self._draws.samples)
            self._changed.clear()
            await self._changed.wait()
        groups, tally = self._hand_out(), self._tally
        self._tally = Tally()
        scored = tally.batch(self._step, groups, self._draws.refill)
        self._step += 1
        return evolve(scored, seconds={"rollout": time.perf_counter() - started})

    @property
    def _enough(self) -> bool:
        """Whether a batch is ready. Groups without spread count once the allowed number of replacements is used up."""
        ready, refill = len(self._ready), self._draws.refill
        if refill is not None and self._tally.zero_variance + ready >= (1 + refill.attempts) * self._draws.prompts:
            ready += len(self._set_aside)
        return ready >= self._draws.prompts and (not self._waits or self._others_in_time)

    @property
    def _others_in_time(self) -> bool:
        """Whether all groups that are not ready can still be trained on in time, after those that would be handed out
        now: oldest first, one batch for each version. It can once the oldest of all are ready."""
        self._ready.sort(key=self._age)
        chosen = {group.number for group in self._ready[: self._draws.prompts]}
        ready = {group.number for group in self._ready}
        others = sorted((group for group in self._groups.values() if group.number not in chosen), key=self._age)
        return all(
            self._age(group)[0] + self._max_staleness > self._version + place // self._draws.prompts
            for place, group in enumerate(others)
            if group.number not in ready  # waiting for these would change nothing
        )

    def _age(self, group: PromptGroup) -> tuple[int, int]:
        """What groups are handed out by, lowest first. One without tokens does not age: none has come yet, or its
        function failed at once."""
        return self._version if group.oldest is None else group.oldest, group.number

    def _hand_out(self) -> list[PromptGroup]:
        self._ready.sort(key=self._age)
        groups, self._ready = self._ready[: self._draws.prompts], self._ready[self._draws.prompts :]
        for group in groups:
            del self._groups[group.number]
        missing = self._draws.prompts - len(groups)
        groups, self._set_aside = [*groups, *self._set_aside[:missing]], []
        return groups

    def _begin(self) -> None:
        """Start prompts for the next batch and for those after it: one more batch if engines keep up, so that samples
        stay fresh; as many as can be trained on in time if they do not."""
        ahead = 1 if len(self._ready) >= self._draws.prompts else self._max_staleness
        batches = min(1 + ahead, self._steps - self._step)
        while len(self._groups) < batches * self._draws.prompts:
            (prompt,) = self._draws.stream.take(1)
            request = self._draws.sampler.request(
                [prompt],
                rollout_step=self._step,
                samples=self._draws.samples,
                params=self._draws.params,
                attempt=self._begun,  # no two groups of a run share noise
            )
            group = PromptGroup(number=self._begun, prompt=prompt, request=request)
            self._groups[group.number] = group
            self._begun += 1
            task = asyncio.create_task(self._sample(group), name=f"samples of prompt {prompt.index}")
            task.add_done_callback(self._ended)
            self._tasks[group.number] = task

    def _give_up_stale(self) -> None:
        """Discard every group that is too stale to train on, and return its prompt to the stream."""
        for group in [each for each in self._groups.values() if not self._fresh(each)]:
            del self._groups[group.number]
            if (task := self._tasks.pop(group.number, None)) is not None:
                task.cancel()
            self._draws.stream.give_back(group.prompt)
            self._tally.give_up(group)
        self._unscored = [(group, rollout) for group, rollout in self._unscored if self._wanted(group)]
        self._ready = [group for group in self._ready if self._wanted(group)]
        self._set_aside = [group for group in self._set_aside if self._fresh(group)]

    def _fresh(self, group: PromptGroup) -> bool:
        return group.oldest is None or self._version - group.oldest <= self._max_staleness

    def _wanted(self, group: PromptGroup) -> bool:
        return group.number in self._groups

    def _raise_failure(self) -> None:
        """Raise the error of a failed task here, before its consequences surface instead."""
        if self._failure is not None:
            raise self._failure

    # ---- tasks ------------------------------------------------------------------------------------------------------

    async def _sample(self, group: PromptGroup) -> None:
        rollout = await self._draws.sampler.draw([group.prompt], group.request, ahead=True, drew=group.drew)
        del self._tasks[group.number]
        self._unscored.append((group, rollout))
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.ensure_future(self._score())
            self._scoring.add_done_callback(self._ended)

    async def _score(self) -> None:
        """Score all that is sampled; what comes meanwhile is scored together afterwards."""
        while self._unscored:
            drawn, self._unscored = self._unscored, []
            scores = await self._draws.reward.score(Rollout.concatenate([rollout for _, rollout in drawn]), part=True)
            ends = np.cumsum([len(rollout.batch) for _, rollout in drawn])[:-1]
            rewards, failed = np.split(scores.rewards, ends), np.split(scores.failed, ends)
            self._tally.score(scores)
            for (group, rollout), reward, none in zip(drawn, rewards, failed, strict=True):
                group.rollout, group.rewards, group.failed = rollout, reward, none
                group.first_failure = scores.first
                if self._wanted(group):
                    self._keep(group)
            self._changed.set()

    def _keep(self, group: PromptGroup) -> None:
        """Add a scored group to the ready ones; if it lacks spread, set it aside so that another is started instead."""
        refill = self._draws.refill
        if refill is None or refill.useful(group.rewards, np.zeros(len(group.rewards), dtype=np.int64)).all():
            self._ready.append(group)
            return
        self._set_aside.append(group)
        self._tally.zero_variance += 1
        del self._groups[group.number]

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        self._engines.loop.run(self._hold())
        yield
        self._engines.loop.run(self._release(version))

    async def _hold(self) -> None:
        self._raise_failure()
        if self._begun:
            await self._engines.pause()
            self._raise_failure()

    async def _release(self, version: int) -> None:
        self._version = version
        self._give_up_stale()
        if self._begun:
            await self._engines.resume()
        self._changed.set()

    def close(self) -> None:
        self._engines.loop.begin(self._cancel())

    async def _cancel(self) -> None:
        for task in [*self._tasks.values(), *([self._scoring] if self._scoring else [])]:
            task.cancel()

    # ---- resume -----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step, the prompt stream with in-flight prompts returned, and how many groups were started,
        so that no later group reuses their noise."""
        return self._engines.loop.run(self._position())

    async def _position(self) -> dict[str, Any]:
        prompts = self._draws.stream.position_without(group.prompt for group in self._groups.values())
        return {"rollout_step": self._step, "prompts": prompts, "begun": self._begun}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        self._begun = position.get("begun", 0)
