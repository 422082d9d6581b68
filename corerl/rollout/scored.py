"""A sampled and scored rollout step, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from corerl.data.chat import MARK, readable
from corerl.data.prompts import Prompt
from corerl.errors import DataError
from corerl.pictures import name_of
from corerl.plugin.events import SampleShown
from corerl.rollout.rewards import exact_match
from corerl.rollout.sampler import Rollout
from corerl.rollout.scoring import PartSums
from corerl.types import FloatArray, IntArray

SHOWN = 3  # prompts that displays have a sample of


@frozen(kw_only=True)
class ScoredRollout:
    """One sampled and scored rollout step, ready for computing advantages."""

    step: int  # rollout step
    rollout: Rollout
    rewards: FloatArray  # [B] the same for all rows of a sample
    exact_match: float | None  # fraction of samples that equal their answer; None if no prompt has one
    seconds: Mapping[str, float]  # by phase: rollout, reward
    failures: Mapping[str, int] = field(factory=dict)  # failed samples by kind of failure
    first_failure: str = ""  # as one line
    counts: Mapping[str, int] = field(factory=dict)  # of other samples generated for this step, by name
    parts: PartSums = field(factory=dict)  # of rewards that have several, over all samples scored for this step
    values: Mapping[str, FloatArray] = field(factory=dict)  # [B] of each part; NaN for samples that lack it

    def shown(self) -> tuple[SampleShown, ...]:
        """The first sample of each of the first prompts, for display."""
        return shown(self.rollout, self.rewards, first_samples(self.rollout), values=self.values)

    def samples(self) -> tuple[SampleShown, ...]:
        """All samples as texts; of an episode, its last answer."""
        return shown(self.rollout, self.rewards, values=self.values)

    def take_prompts(self, groups: IntArray) -> ScoredRollout:
        """Only the samples of these prompts [n]."""
        rollout, rows = self.rollout.take_prompts(groups), self.rollout.prompt_rows(groups)
        values = {name: each[rows] for name, each in self.values.items()}
        return evolve(
            self, rollout=rollout, rewards=self.rewards[rows], exact_match=exact_fraction(rollout), values=values
        )


def exact_fraction(rollout: Rollout) -> float | None:
    """The fraction of samples that equal their prompt's answer, among prompts that have one; None if none has."""
    rows, _ = rollout.batch.episodes
    groups = rollout.batch.row_columns["group"][rows].tolist()
    answered = [(rollout.prompts[group], rollout.texts[row]) for row, group in zip(rows.tolist(), groups, strict=True)]
    matches = [exact_match(prompt, text) for prompt, text in answered if prompt.answer]
    return sum(matches) / len(matches) if matches else None


def truncated_fraction(rollout: Rollout) -> float:
    """The fraction of samples that were cut off at a limit, in any row."""
    _, episode_of = rollout.batch.episodes
    return float((np.bincount(episode_of, weights=rollout.batch.row_columns["truncated"]) > 0).mean())


def first_samples(rollout: Rollout) -> IntArray:
    """[n] rows of the first sample of each of the first prompts, with all of its roles."""
    rows, _ = rollout.batch.episodes
    first = rows[rollout.batch.row_columns["sample"][rows] == 0]
    groups = rollout.batch.row_columns["group"][first]
    return first[np.isin(groups, np.unique(groups)[:SHOWN])]


def shown(
    rollout: Rollout,
    rewards: FloatArray,
    rows: IntArray | None = None,
    *,
    values: Mapping[str, FloatArray] | None = None,
) -> tuple[SampleShown, ...]:
    """The samples in these rows as texts, by default all; of an episode, its last answer. The prompt of a chat is all
    that the model was given, including the config's system message. `values` are [B] of each part of the rewards."""
    rows = rollout.batch.episodes[0] if rows is None else rows
    groups = rollout.batch.row_columns["group"][rows].tolist()
    prompts = {group: rollout.prompts[group] for group in groups}
    texts = {group: _text(prompt) for group, prompt in prompts.items()}
    return tuple(
        SampleShown(
            prompt=texts[group],
            response=rollout.texts[row],
            answer=prompts[group].answer,
            reward=reward,
            sample=int(rollout.batch.row_columns["sample"][row]),
            source=prompts[group].source,
            pictures=[name_of(each) for each in prompts[group].pictures],
            parts={name: float(each[row]) for name, each in (values or {}).items() if not np.isnan(each[row])},
        )
        for row, group, reward in zip(rows.tolist(), groups, rewards[rows].tolist(), strict=True)
    )


def _text(prompt: Prompt) -> str:
    """With its pictures as `<picture 3f9a 1312x736>`: in their places in a chat, before a text."""
    text, names = readable(prompt.messages) or prompt.text, [repr(each) for each in prompt.pictures]
    if text.count(MARK) != len(names):
        return "".join([*names, text])
    parts = text.split(MARK)
    return parts[0] + "".join(name + part for name, part in zip(names, parts[1:], strict=True))


def postprocessed(scored: ScoredRollout, function: Callable[[ScoredRollout], Any], *, name: str) -> ScoredRollout:
    """What `function` makes of a batch: it may shape rewards, drop samples or change loss masks; `name` is the
    config's. Raises DataError if it raises, or returns a batch that cannot be trained on."""
    try:
        result = function(scored)
    except Exception as error:
        raise DataError(
            f"rollout.postprocess={name!r} raised {type(error).__name__}: {error} at step {scored.step}"
        ) from error
    if not isinstance(result, ScoredRollout):
        what = "nothing" if result is None else type(result).__name__
        raise DataError(
            f"rollout.postprocess={name!r} returned {what}, wanted a corerl.rollout.ScoredRollout; return the "
            "batch that was passed in, or a copy made with `attrs.evolve`"
        )
    batch, rewards = result.rollout.batch, np.asarray(result.rewards)
    flaw = ""
    if not len(batch):
        flaw = "without samples"
    elif missing := sorted(scored.rollout.batch.names - batch.names):
        flaw = f"without the column {missing[0]!r}; keep it, as `attrs.evolve` does"
    elif not len(rewards) == len(batch) == len(result.rollout.texts):
        flaw = f"of {len(batch)} samples with {len(rewards)} rewards and {len(result.rollout.texts)} texts"
    elif rewards.dtype.kind not in "fiu" or not np.isfinite(rewards).all():
        flaw = "whose rewards are not all finite numbers"
    else:
        episodes, episode_of = batch.episodes
        if (rewards != rewards[episodes][episode_of]).any():
            flaw = "in which rows of an episode have different rewards; give each its episode's (`batch.episodes`)"
    if flaw:
        raise DataError(f"rollout.postprocess={name!r} returned a batch {flaw}")
    values = {name: each for name, each in result.values.items() if len(each) == len(rewards)}  # else rows are gone
    return evolve(result, rewards=rewards, values=values)
