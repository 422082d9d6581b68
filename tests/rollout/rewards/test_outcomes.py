"""Rewards that samples bring, and those of the samples that bring none, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from corerl.data.prompts import Prompt
from corerl.errors import RewardError
from corerl.rollout.rewards.base import Failure, Judged, OutcomeScorer, Reward
from corerl.rollout.sampler import Rollout
from corerl.types import SampleBatch

LATE = Failure(kind="timeout", message="it was late")


def brought(outcomes: Sequence[Any], **rows: list[int]) -> Rollout:
    count = len(outcomes)
    batch = SampleBatch(
        tokens=np.zeros(count, np.int64),
        offsets=np.arange(count + 1),
        rows={"group": np.zeros(count, np.int64), **{name: np.array(each) for name, each in rows.items()}},
    )
    texts = ["x" * (1 + row) for row in range(count)]
    return Rollout(batch=batch, prompts=(Prompt(index=3, text="?", answer=""),), texts=texts, outcomes=list(outcomes))


def by_length(failed: float = -1.0) -> OutcomeScorer:
    return OutcomeScorer(Reward(name="long", function=lambda prompt, text: len(text)), failed_value=failed)


def test_samples_that_bring_no_reward_are_scored_and_the_others_are_not() -> None:
    scores = by_length().score(brought([0.5, None, LATE, Judged(reward=2.0, parts={"right": 1.5, "short": 0.5})]))
    assert scores.rewards.tolist() == [0.5, 2.0, -1.0, 2.0]
    assert scores.failed.tolist() == [False, False, True, False]
    assert (scores.failures, scores.first) == ({"timeout": 1}, "it was late")
    assert scores.parts == {"right": (1.5, 1), "short": (0.5, 1)}


def test_a_batch_that_brings_no_rewards_is_scored_as_ever() -> None:
    rollout = brought([None, None, None])
    assert by_length().score(rollout).rewards.tolist() == [1.0, 2.0, 3.0]


def test_rows_of_an_episode_share_the_reward_of_its_last_answer() -> None:
    episode, final = [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]
    scores = by_length().score(brought([None] * 3 + [7.0] * 2, episode=episode, final=final))
    assert scores.rewards.tolist() == [2.0, 2.0, 2.0, 7.0, 7.0]  # the text of row 1 has two characters


def test_a_batch_of_failures_is_an_error_and_a_part_of_one_is_not() -> None:
    rollout = brought([LATE, LATE])
    with pytest.raises(RewardError, match="^it was late; none of the 2 samples has a reward$"):
        by_length().score(rollout)
    assert by_length(0.25).score(rollout, part=True).rewards.tolist() == [0.25, 0.25]
