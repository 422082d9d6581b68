"""Sample prompts one by one, each in a task of its own, and score what is sampled as it comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import RewardError
from corerl.rollout.rewards.base import Scores, added
from corerl.rollout.sampler import Rollout
from corerl.rollout.sources.base import BatchSampler, Scored, exact_share
from corerl.types import BoolArray, FloatArray


@define(kw_only=True, eq=False)
class PromptGroup:
    """The samples of one prompt, from when they are started until they are handed out."""

    number: int  # in starting order
    prompt: Prompt
    request: GenerateRequest  # for all samples, as first issued
    tokens: int = 0  # sampled so far, where `drew` hears of them
    oldest: int | None = None  # the weights version that sampled the oldest of them
    # Set once everything is sampled:
    rollout: Rollout = field(init=False)
    # Set once it is scored:
    rewards: FloatArray = field(init=False)  # [G]
    useful: bool = True  # False if dynamic sampling wants another group in its place
    failed: BoolArray = field(init=False)  # [G] True where scoring failed
    first_failure: str = ""  # of the call that scored the group

    def drew(self, generation: Generation) -> None:
        if len(generation.tokens):
            oldest = int(generation.versions.min())
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)
            self.tokens += len(generation.tokens)


class Groups:
    """Samples each group in a task; what is sampled while others are scored is scored together afterwards."""

    def __init__(self, draws: BatchSampler, keep: Callable[[PromptGroup], None]) -> None:
        """`keep` gets each group once it is scored."""
        self.changed = asyncio.Event()  # set when groups were kept, or something failed
        self._draws = draws
        self._keep = keep
        self._tasks: dict[int, asyncio.Task[None]] = {}  # that sample, by the group's number
        self._unscored: list[PromptGroup] = []
        self._scoring: asyncio.Task[None] | None = None
        self._calls: list[Scores] = []  # of the reward since the last batch
        self._failure: BaseException | None = None

    def begin(self, group: PromptGroup, drew: Callable[[Generation], None] | None = None) -> None:
        """Start to sample this group; `drew` gets all that is drawn, piece by piece."""
        task = asyncio.create_task(self._sample(group, drew), name=f"samples of prompt {group.prompt.index}")
        task.add_done_callback(self._ended)
        self._tasks[group.number] = task

    def give_up(self, group: PromptGroup) -> None:
        """End its task, and score it no more; if it is being scored already, it is kept nevertheless."""
        if (task := self._tasks.pop(group.number, None)) is not None:
            task.cancel()
        self._unscored = [each for each in self._unscored if each is not group]

    def batch(self, groups: Sequence[PromptGroup], *, step: int) -> Scored:
        """Make these groups, all scored, the batch of rollout step `step`; its failures and parts are of all that was
        scored since the last one. Raises RewardError if every sample failed to score."""
        calls, self._calls = self._calls, []
        first = next((scores.first for scores in calls if scores.first), "")
        if all(group.failed.all() for group in groups):
            why = next((group.first_failure for group in groups if group.first_failure), first)
            raise RewardError(f"{why}; all {sum(len(group.request) for group in groups)} samples failed")
        rollout = Rollout.concatenate([group.rollout for group in groups])
        return Scored(
            step=step,
            rollout=rollout,
            rewards=np.concatenate([group.rewards for group in groups]),
            exact_match=exact_share(rollout),
            seconds={},
            failures=dict(sum((Counter(scores.failures) for scores in calls), Counter[str]())),
            first_failure=first,
            parts=added(*(scores.parts for scores in calls)),
        )

    def raise_failure(self) -> None:
        """Raise the error of a failed task here, before its consequences surface instead."""
        if self._failure is not None:
            raise self._failure

    async def cancel(self) -> None:
        for task in [*self._tasks.values(), *([self._scoring] if self._scoring else [])]:
            task.cancel()

    async def _sample(self, group: PromptGroup, drew: Callable[[Generation], None] | None) -> None:
        group.rollout = await self._draws.sampler.answer([group.prompt], group.request, ahead=True, drew=drew)
        del self._tasks[group.number]
        self._unscored.append(group)
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score())
            self._scoring.add_done_callback(self._ended)

    async def _score(self) -> None:
        while self._unscored:
            groups, self._unscored = self._unscored, []
            scores = await self._draws.reward.score(Rollout.concatenate([group.rollout for group in groups]), part=True)
            self._calls.append(scores)
            refill = self._draws.refill
            deciding = scores.rewards if refill is None else refill.deciding(scores)
            ends = np.cumsum([len(group.rollout.batch) for group in groups])[:-1]
            parts = zip(
                groups, *(np.split(each, ends) for each in (scores.rewards, scores.failed, deciding)), strict=True
            )
            for group, rewards, failed, decides in parts:
                group.rewards, group.failed, group.first_failure = rewards, failed, scores.first
                if refill is not None:
                    group.useful = bool(refill.useful(decides, np.zeros(len(decides), dtype=np.int64)).all())
                self._keep(group)
            self.changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.changed.set()
