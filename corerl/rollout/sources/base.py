"""Supply the loop with scored batches."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import evolve, field, frozen

from corerl.data.chat import readable
from corerl.data.prompts import PromptStream
from corerl.engines.base import SamplingParams
from corerl.plugin.events import SampleShown
from corerl.rollout.rewards.base import PartSums, Scores, Scoring, added
from corerl.rollout.rewards.lookup import exact_match
from corerl.rollout.sampler import Rollout, Sampler
from corerl.types import BoolArray, FloatArray, IntArray


@frozen(kw_only=True)
class Scored:
    """One sampled and scored rollout step, ready for computing advantages."""

    step: int  # rollout step
    rollout: Rollout
    rewards: FloatArray  # [B] the same for all samples of an episode
    exact_match: float | None  # share of samples that equal their answer; None if no prompt has one
    seconds: Mapping[str, float]  # by phase: rollout, reward
    failures: Mapping[str, int] = field(factory=dict)  # failed samples by kind of failure
    first_failure: str = ""  # as one line
    counts: Mapping[str, int] = field(factory=dict)  # of other samples drawn for this step, by name
    parts: PartSums = field(factory=dict)  # of rewards that have several, over all samples scored for this step

    def shown(self, count: int = 3) -> tuple[SampleShown, ...]:
        """The first sample of each of the first `count` prompts, for display."""
        return shown(self.rollout, self.rewards, first_samples(self.rollout, count))

    def samples(self) -> tuple[SampleShown, ...]:
        """All samples as texts, of an episode its last answer."""
        return shown(self.rollout, self.rewards)

    def take(self, groups: IntArray) -> Scored:
        """Only the samples of these prompts [n]."""
        rollout, rewards = self.rollout.take(groups), self.rewards[self.rollout.rows(groups)]
        return evolve(self, rollout=rollout, rewards=rewards, exact_match=exact_share(rollout))

    @classmethod
    def concatenate(cls, parts: Sequence[Scored]) -> Scored:
        """Combine several attempts at one step."""
        rollout = Rollout.concatenate([part.rollout for part in parts])
        return evolve(
            parts[0],
            rollout=rollout,
            rewards=np.concatenate([part.rewards for part in parts]),
            exact_match=exact_share(rollout),
        )


@frozen(kw_only=True)
class Arrived:
    """The samples of one prompt, before those of the step's others are there."""

    number: int  # the prompt's place in the step
    of: int  # how many prompts the step has
    scored: Scored


@frozen(kw_only=True)
class DynamicSampling:
    """Drop groups that teach nothing, and sample other prompts in their place."""

    useful: Callable[[FloatArray, IntArray], BoolArray]  # what decides [B], groups [B] -> [P]
    attempts: int  # extra attempts; what is still missing then is filled up with dropped groups
    part: str = ""  # of the reward, which decides; "": the reward itself
    _seen: set[str] = field(factory=set, init=False, eq=False)  # parts that samples have had

    def deciding(self, scores: Scores) -> FloatArray:
        """[B] what decides. Raises RewardError if no sample so far had the part."""
        self._seen.update(scores.values)
        if self.part in self._seen - scores.values.keys():  # other prompts, whose reward may have other parts
            return scores.rewards
        return scores.part(self.part, setting="algorithm.dynamic_sampling_on")


class Source(ABC):
    """Rollout steps, one after the other. `next` is a coroutine of the event loop of the engines; all else is called in
    the thread that updates weights, while no `next` runs or all engines have died.

    A step counts as done once it is handed out: a resumed run continues from the `position`, and what `save` wrote,
    taken after that step was trained on.
    """

    overlaps: ClassVar[bool] = False  # whether engines may generate while weights are trained, hence during an update
    streams: ClassVar[bool] = False  # whether prompts of a step arrive before it is whole

    @abstractmethod
    async def next(self) -> Scored | None:
        """The next step; None after the last one."""

    async def arrived(self) -> Sequence[Arrived]:
        """What has come of the next step since the last call, waiting for at least one prompt; empty once all have been
        handed out, and `next` has them together."""
        return ()

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""

    @abstractmethod
    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `position`; `checkpoint` is the directory that `save` wrote into. Raises CheckpointError if the
        data differ from the checkpoint's."""

    def renumber(self, updates: int) -> None:  # noqa: B027  -- most keep no samples
        """After `restore`: engines have had so many updates since the checkpoint that are void. Samples of it are as
        many versions behind as they were."""

    def save(self, checkpoint: Path) -> None:  # noqa: B027  -- most have nothing to add
        """Write the state that `position` does not hold. Raises DataError."""

    def updating(self, version: int) -> AbstractContextManager[None]:
        """A context in which engines generate nothing; when it ends, they hold weights `version`."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027  -- most do nothing by themselves
        """Stop sampling; returns at once."""


@frozen(kw_only=True)
class BatchSampler:
    """Turns the next prompts into a scored batch. Raises what sampler and reward raise."""

    stream: PromptStream
    sampler: Sampler
    reward: Scoring
    params: SamplingParams
    prompts: int  # per step
    samples: int  # per prompt
    refill: DynamicSampling | None = None

    async def batch(self, step: int) -> Scored:
        """The batch of rollout step `step`."""
        first = await self._scored(step, *await self.sample(step))
        return first[0] if self.refill is None else await self._refilled(*first, self.refill)

    async def sample(self, step: int, attempt: int = 0, *, ahead: bool = False) -> tuple[Rollout, float]:
        """Sample the next prompts; returns the rollout and the seconds it took. `ahead`: nobody waits for it yet."""
        started = time.perf_counter()
        rollout = await self.sampler.sample(
            self.stream.take(self.prompts),
            rollout_step=step,
            samples=self.samples,
            params=self.params,
            attempt=attempt,
            ahead=ahead,
        )
        return rollout, time.perf_counter() - started

    async def score(self, step: int, rollout: Rollout, seconds: float) -> Scored:
        return (await self._scored(step, rollout, seconds))[0]

    async def _scored(self, step: int, rollout: Rollout, seconds: float) -> tuple[Scored, Scores]:
        started = time.perf_counter()
        scores = await self.reward.score(rollout)
        scored = Scored(
            step=step,
            rollout=rollout,
            rewards=scores.rewards,
            exact_match=exact_share(rollout),
            seconds={"rollout": seconds, "reward": time.perf_counter() - started},
            failures=scores.failures,
            first_failure=scores.first,
            parts=scores.parts,
        )
        return scored, scores

    async def _refilled(self, first: Scored, scores: Scores, refill: DynamicSampling) -> Scored:
        attempts, useful, zero_variance = [first], [], []
        while True:
            scored = attempts[-1]
            teaches = refill.useful(refill.deciding(scores), scored.rollout.batch.rows["group"])
            useful.append(scored.take(np.flatnonzero(teaches)))
            zero_variance.append(scored.take(np.flatnonzero(~teaches)))
            found = sum(len(part.rollout.prompts) for part in useful)
            if found >= self.prompts or len(attempts) > refill.attempts:
                break
            scored, scores = await self._scored(first.step, *await self.sample(first.step, len(attempts)))
            attempts.append(scored)
        kept = Scored.concatenate([*useful, *zero_variance]).take(np.arange(self.prompts))
        return evolve(
            kept,
            seconds={name: sum(scored.seconds[name] for scored in attempts) for name in first.seconds},
            failures=dict(sum((Counter(scored.failures) for scored in attempts), Counter[str]())),
            first_failure=next((scored.first_failure for scored in attempts if scored.first_failure), ""),
            parts=added(*(scored.parts for scored in attempts)),
            counts={
                "attempts": len(attempts),
                "groups_set_aside": sum(len(part.rollout.prompts) for part in zero_variance),
                "groups_unused": max(found - self.prompts, 0),
                "groups_missing": max(self.prompts - found, 0),
            },
        )


def exact_share(rollout: Rollout) -> float | None:
    """The share of samples that equal their prompt's answer, among prompts that have one; None if none has."""
    samples, _ = rollout.batch.episodes
    answered = [(rollout.prompts[rollout.batch.rows["group"][row]], rollout.texts[row]) for row in samples.tolist()]
    matches = [exact_match(prompt, text) for prompt, text in answered if prompt.answer]
    return sum(matches) / len(matches) if matches else None


def first_samples(rollout: Rollout, count: int) -> IntArray:
    """[n] rows of the first sample of each of the first `count` prompts."""
    samples, _ = rollout.batch.episodes
    return samples[rollout.batch.rows["sample"][samples] == 0][:count]


def shown(rollout: Rollout, rewards: FloatArray, rows: IntArray | None = None) -> tuple[SampleShown, ...]:
    """The samples in these rows as texts; by default all, of an episode its last answer. Of a chat, the prompt is
    all that the model was given, and so has the config's system message too."""
    rows = rollout.batch.episodes[0] if rows is None else rows
    groups = rollout.batch.rows["group"][rows].tolist()
    prompts = {group: rollout.prompts[group] for group in groups}
    texts = {group: readable(prompt.messages) or prompt.text for group, prompt in prompts.items()}
    return tuple(
        SampleShown(
            prompt=texts[group],
            response=rollout.texts[row],
            answer=prompts[group].answer,
            reward=reward,
            sample=int(rollout.batch.rows["sample"][row]),
            source=prompts[group].source,
        )
        for row, group, reward in zip(rows.tolist(), groups, rewards[rows].tolist(), strict=True)
    )
