"""A sampled and scored rollout step, and what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from corerl.data.chat import readable
from corerl.plugin.events import SampleShown
from corerl.rollout.rewards.base import PartSums
from corerl.rollout.rewards.lookup import exact_match
from corerl.rollout.sampler import Rollout
from corerl.types import FloatArray, IntArray


@frozen(kw_only=True)
class ScoredRollout:
    """One sampled and scored rollout step, ready for computing advantages."""

    step: int  # rollout step
    rollout: Rollout
    rewards: FloatArray  # [B] the same for all samples of an episode
    exact_match: float | None  # share of samples that equal their answer; None if no prompt has one
    seconds: Mapping[str, float]  # by phase: rollout, reward
    failures: Mapping[str, int] = field(factory=dict)  # failed samples by kind of failure
    first_failure: str = ""  # as one line
    counts: Mapping[str, int] = field(factory=dict)  # of other samples generated for this step, by name
    parts: PartSums = field(factory=dict)  # of rewards that have several, over all samples scored for this step

    def shown(self, count: int = 3) -> tuple[SampleShown, ...]:
        """The first sample of each of the first `count` prompts, for display."""
        return shown(self.rollout, self.rewards, first_samples(self.rollout, count))

    def samples(self) -> tuple[SampleShown, ...]:
        """All samples as texts; of an episode, its last answer."""
        return shown(self.rollout, self.rewards)

    def take(self, groups: IntArray) -> ScoredRollout:
        """Only the samples of these prompts [n]."""
        rollout, rewards = self.rollout.take(groups), self.rewards[self.rollout.rows(groups)]
        return evolve(self, rollout=rollout, rewards=rewards, exact_match=exact_share(rollout))


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
    """The samples in these rows as texts, by default all; of an episode, its last answer. The prompt of a chat is all
    that the model was given, including the config's system message."""
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
