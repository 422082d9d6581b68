"""Score rollouts: the rewards that samples bring, and a reward function's of all others."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import Factory, evolve, field, frozen

from corerl.errors import RewardError
from corerl.messages import did_you_mean, short_repr
from corerl.rollout.rewards import Failure, Judged, Outcome, Reward, Sample, Tokens, number
from corerl.types import ROLE, BoolArray, FloatArray, IntArray, OnProgress, SampleBatch

if TYPE_CHECKING:
    from corerl.rollout.sampler import Rollout

PartSums = Mapping[str, tuple[float, int]]  # by name: the sum of a part's values, and the number of samples with it


def add_parts(*sums: PartSums) -> PartSums:
    """The sums of several calls together."""
    total: dict[str, tuple[float, int]] = {}
    for each in sums:
        for name, (value, count) in each.items():
            before, counted = total.get(name, (0.0, 0))
            total[name] = before + value, counted + count
    return total


@frozen(kw_only=True)
class Scores:
    """The rewards of a rollout's samples, and which of them failed."""

    rewards: FloatArray  # [B] reward.failed_value for failed samples
    failures: Mapping[str, int] = field(factory=dict)  # samples by kind of failure
    first: str = ""  # the first failure in sample order, as one line
    # [B] True for failed samples
    failed: BoolArray = field(default=Factory(lambda self: np.zeros(len(self.rewards), np.bool_), takes_self=True))
    parts: PartSums = field(factory=dict)  # over all samples that did not fail
    values: Mapping[str, FloatArray] = field(factory=dict)  # [B] of each part; NaN for samples that lack it

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], *, failed_value: float) -> Scores:
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        parts = [each.parts if isinstance(each, Judged) else {} for each in outcomes]
        names = dict.fromkeys(name for each in parts for name in each)
        rewards = [failed_value if isinstance(outcome, Failure) else outcome.reward for outcome in outcomes]
        return cls(
            rewards=np.array(rewards, dtype=np.float32),
            failures=dict(Counter(failure.kind for failure in failures)),
            first=failures[0].message if failures else "",
            failed=np.array([isinstance(outcome, Failure) for outcome in outcomes], dtype=np.bool_),
            parts=add_parts(*({name: (value, 1) for name, value in each.items()} for each in parts)),
            values={name: np.array([each.get(name, np.nan) for each in parts], np.float32) for name in names},
        )

    def take_rows(self, rows: IntArray) -> Scores:
        """Those of these rows; failures and parts are counted as before."""
        values = {name: each[rows] for name, each in self.values.items()}
        return evolve(self, rewards=self.rewards[rows], failed=self.failed[rows], values=values)

    @classmethod
    def joined(cls, batches: Sequence[Scores]) -> Scores:
        """Those of several batches in a row, or of none; values are NaN where a batch lacks the part."""
        names = dict.fromkeys(name for each in batches for name in each.values)
        return cls(
            rewards=np.concatenate([np.zeros(0, np.float32), *(each.rewards for each in batches)]),
            failures=dict(sum((Counter(each.failures) for each in batches), Counter[str]())),
            first=next((each.first for each in batches if each.first), ""),
            failed=np.concatenate([np.zeros(0, np.bool_), *(each.failed for each in batches)]),
            parts=add_parts(*(each.parts for each in batches)),
            values={
                name: np.concatenate([each.values.get(name, np.full_like(each.rewards, np.nan)) for each in batches])
                for name in names
            },
        )

    def part(self, name: str, *, setting: str) -> FloatArray:
        """[B] the part that `setting` names, but the reward of samples that lack it, such as failed ones; "" is the
        reward itself. Raises RewardError if no sample has it."""
        if not name or self.failed.all():
            return self.rewards
        if name not in self.values:
            known = f"its parts are {', '.join(map(repr, self.values))}" if self.values else "the reward has no parts"
            raise RewardError(f"{setting}: {name!r} is no part of the reward; {known}{did_you_mean(name, self.values)}")
        values = self.values[name]
        return np.where(np.isnan(values), self.rewards, values)


class Scorer(Protocol):
    def score(self, rollout: Rollout, *, partial: bool = False) -> Scores:
        """Raises RewardError if all samples fail: the reward must be broken. If they are only a piece of a batch
        (`partial`), all of them may fail."""


class RewardScorer:
    """Scores with a reward function what brings no reward of its own."""

    def __init__(
        self,
        reward: Reward,
        outcomes: Callable[[Sequence[Sample], OnProgress | None], list[Outcome]] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> None:
        """`outcomes` calls the function, by default in this process and without a time limit. `on_progress` gets how
        many samples of a batch are scored, and how many it has."""
        self._reward = reward
        self._outcomes = outcomes or reward.outcomes
        self._on_progress = on_progress

    def score(self, rollout: Rollout, *, partial: bool = False) -> Scores:
        """As `Scorer.score`. An episode is scored once, by its last answer, and all its rows get that reward."""
        episodes, episode_of = rollout.batch.episodes
        if len(episodes) < len(episode_of):
            rollout = rollout.take_rows(episodes)
        outcomes = {row: _brought(each) for row, each in enumerate(rollout.outcomes) if each is not None}
        missing = [row for row in range(len(episodes)) if row not in outcomes]
        if missing:
            samples = samples_of(rollout, tokens=self._reward.takes_tokens)
            found = self._outcomes([samples[row] for row in missing], None if partial else self._on_progress)
            outcomes.update(zip(missing, found, strict=True))
        every = [outcomes[row] for row in range(len(episodes))]
        if ROLE in rollout.batch.row_columns:
            every = [_by_role(*each) for each in zip(every, rollout.batch.row_columns[ROLE].tolist(), strict=True)]
        scores = Scores.of(every, failed_value=self._reward.failed_value)
        if scores.first and scores.failed.all() and not partial:
            raise RewardError(scores.first + (f"; all {len(every)} samples failed" if len(every) > 1 else ""))
        return scores.take_rows(episode_of) if len(every) < len(episode_of) else scores


def _brought(outcome: float | Outcome) -> Outcome:
    """What a sampler says of a sample: one reward of NaN would leave its whole group without advantages."""
    if isinstance(outcome, Failure):
        return outcome
    judged = outcome if isinstance(outcome, Judged) else Judged(reward=outcome)
    if number(judged.reward) is None:
        message = f"the sampler gave a sample the reward {short_repr(judged.reward)}, wanted a finite number"
        return Failure(kind="no-number", message=message)
    return judged


def _by_role(outcome: Outcome, role: str) -> Outcome:
    """With the reward as a part that is named by the role, before the parts of that."""
    if isinstance(outcome, Failure):
        return outcome
    parts = {f"{role}/{name}": value for name, value in outcome.parts.items()}
    return evolve(outcome, parts={role: outcome.reward, **parts})


class AsyncScorer:
    """Scores rollouts one after the other, as rewards need not be thread-safe, while the event loop goes on."""

    def __init__(
        self,
        scorer: Scorer,
        call: Callable[[Callable[[], Scores]], Awaitable[Scores]],
        span: Callable[[], AbstractContextManager[None]] = nullcontext,
        turn: asyncio.Lock | None = None,
    ) -> None:
        """`call` runs the scorer in a thread that may wait; its turns are in contexts of `span`. Scorers with one lock
        `turn` wait for each other."""
        self._scorer = scorer
        self._call = call
        self._span = span
        self._turn = turn or asyncio.Lock()

    async def score(self, rollout: Rollout, *, partial: bool = False) -> Scores:
        """As `Scorer.score`. If it is cancelled, the scorer still ends its turn."""
        await self._turn.acquire()
        scoring = asyncio.ensure_future(self._score(rollout, partial=partial))
        scoring.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(scoring)

    async def _score(self, rollout: Rollout, *, partial: bool) -> Scores:
        with self._span():
            return await self._call(functools.partial(self._scorer.score, rollout, partial=partial))


def samples_of(rollout: Rollout, *, tokens: bool) -> list[Sample]:
    """[B] prompt, response, and the response's tokens, or none, as they are many to send to another process."""
    found = _response_tokens(rollout.batch) if tokens else repeat((), len(rollout.texts))
    return [
        (rollout.prompts[group], text, ids)
        for group, text, ids in zip(rollout.batch.row_columns["group"], rollout.texts, found, strict=True)
    ]


def _response_tokens(batch: SampleBatch) -> Iterator[Tokens]:
    """[B] each response's tokens with the one that ended it; of an episode, its last answer's."""
    sampled = batch.columns.get("loss_mask")
    for first, last in pairwise(batch.offsets.tolist()):
        places = np.flatnonzero(sampled[first:last]) if sampled is not None else np.arange(last - first)
        answers = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)  # runs of sampled tokens
        yield batch.tokens[first + answers[-1]].astype(np.int32)
