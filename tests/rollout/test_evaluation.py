"""Scores of the policy on held-out prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.errors import RewardError
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.evaluation import Evaluation, evaluate
from corerl.rollout.rewards.base import Reward
from corerl.rollout.rewards.lookup import resolve_reward
from corerl.rollout.sampler import Sampler
from tests.rollout.engines import at_once

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
REWARD = resolve_reward("position-match", {})
PROMPTS = [Prompt(index=i, text=f"{i}>", answer=answer) for i, answer in enumerate(["12", "98", "5"])]


class Draws:
    """Answers "12<eos>", "9<eos>", "5<eos>"."""

    def __init__(self) -> None:
        self.asked: list[tuple[GenerateRequest, bool]] = []

    async def __call__(self, request: GenerateRequest, *, urgent: bool = False, **_: Any) -> Generation:
        self.asked.append((request, urgent))
        return Generation(
            tokens=np.array([5, 6, 2, 13, 2, 9, 2]),
            offsets=np.array([0, 3, 5, 7]),
            logprobs=np.zeros(7, dtype=np.float32),
            versions=np.ones(7, dtype=np.int64),
            truncated=np.zeros(3, dtype=bool),
        )


def evaluated(
    prompts: list[Prompt], reward: Reward = REWARD, *, generate: Draws | None = None, **options: Any
) -> Evaluation:
    sampler = Sampler(tokenizer=TOKENIZER, generate=generate or Draws(), seed=0)
    return asyncio.run(evaluate(sampler, prompts, at_once(reward), **{"params": PARAMS, **options}))


def test_it_is_greedy_scored_by_hand_and_counts_exact_answers_where_there_are_any() -> None:
    draws = Draws()
    params = evolve(PARAMS, routed_experts=True)  # which are of no use to who trains on nothing
    result = evaluated(PROMPTS, generate=draws, params=params, show=2)
    ((asked, urgent),) = draws.asked
    assert asked.params == evolve(PARAMS, greedy=True) and len(asked) == 3
    assert urgent  # somebody waits for it, and only a later step for what else is drawn
    assert result.metrics == {
        "eval/reward": pytest.approx((1 + 0.5 + 1) / 3),
        "eval/exact_match": pytest.approx(2 / 3),
        "eval/response_length": pytest.approx(7 / 3),
    }
    assert [(shown.prompt, shown.response, shown.answer, shown.reward) for shown in result.shown] == [
        ("0>", "12", "12", 1.0),
        ("1>", "9", "98", 0.5),
    ]
    assert result.samples[:2] == result.shown and [each.prompt for each in result.samples] == ["0>", "1>", "2>"]
    unanswered = [evolve(prompt, answer="") for prompt in PROMPTS]
    free = evaluated(unanswered, Reward(name="ones", function=lambda prompt, text: 1.0))
    assert "eval/exact_match" not in free.metrics


def test_of_mixed_sources_each_has_its_own_reward() -> None:
    mixed = [evolve(prompt, source=name) for prompt, name in zip(PROMPTS, ["a", "b", "a"], strict=True)]
    metrics = evaluated(mixed).metrics
    assert (metrics["eval/a/reward"], metrics["eval/b/reward"]) == (1.0, 0.5)


def test_the_parts_of_rewards_are_told_as_means() -> None:
    weights = {"size": 0.0, "one": 2.0}
    sizes = Reward(name="sizes", function=lambda prompt, text: {"size": len(text), "one": 1}, weights=weights)
    metrics = evaluated(PROMPTS, sizes).metrics
    assert (metrics["eval/reward/one"], metrics["eval/reward/size"]) == (1.0, pytest.approx((2 + 1 + 1) / 3))
    assert metrics["eval/reward"] == 2.0


def test_samples_that_cannot_be_scored_are_counted_and_where_none_can_that_is_an_error() -> None:
    def odd(prompt: Prompt, response: str) -> float:
        if prompt.index == 1:
            raise ValueError("odd")
        return 1.0

    result = evaluated(PROMPTS, Reward(name="odd", function=odd, failed_value=-1.0))
    assert (result.metrics["eval/failed"], result.metrics["eval/reward"]) == (1.0, pytest.approx(1 / 3))
    assert result.failures == {"raised": 1}
    assert result.first_failure.startswith("reward 'odd' raised ValueError: odd (")
    with pytest.raises(RewardError, match="all 3 samples failed"):
        evaluated(PROMPTS, Reward(name="mine", function=lambda prompt, text: float("nan")))
