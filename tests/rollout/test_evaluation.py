"""Scores of the policy on held-out prompts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.errors import RewardError
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.evaluation import EvalSet, Evaluation, evaluate, pass_and_majority
from corerl.rollout.rewards import Reward, find_reward
from corerl.rollout.sampler import PromptSampler, Rollout, Sampler
from corerl.types import ROLE
from tests.engines.services import generation_of
from tests.rollout.engines import at_once
from tests.rollout.listed import Listed
from tests.rollout.samplers import prompt_sampler

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
REWARD = find_reward("position-match", {})
PROMPTS = [Prompt(index=i, text=f"{i}>", answer=answer) for i, answer in enumerate(["12", "98", "5"])]


class Draws:
    """Answers "12<eos>", "9<eos>", and "5<eos>" as if it had been cut off."""

    def __init__(self) -> None:
        self.asked: list[tuple[GenerateRequest, bool]] = []

    async def __call__(self, request: GenerateRequest, *, urgent: bool = False, **_: Any) -> Generation:
        self.asked.append((request, urgent))
        return generation_of([[5, 6, 2], [13, 2], [9, 2]], truncated=[False, False, True])


def evaluated(prompts: list[Prompt], reward: Reward = REWARD, *, generate: Any = None, **own: Any) -> Evaluation:
    """Greedily, but of several samples."""
    sampler = prompt_sampler(tokenizer=TOKENIZER, generate=generate or Draws(), seed=0)
    held_out = EvalSet(source=Listed(prompts), **{"params": evolve(PARAMS, greedy="samples" not in own), **own})
    return asyncio.run(evaluate(sampler, held_out, at_once(reward)))


def test_a_greedy_evaluation_equals_one_by_hand() -> None:
    draws = Draws()
    params = evolve(PARAMS, greedy=True, routed_experts=True)  # which are of no use to who trains on nothing
    result = evaluated(PROMPTS, generate=draws, params=params)
    ((asked, urgent),) = draws.asked
    assert asked.params == evolve(PARAMS, greedy=True) and len(asked) == 3
    assert urgent  # somebody waits for it, and only a later step for what else is drawn
    assert result.metrics == {
        "eval/reward": pytest.approx((1 + 0.5 + 1) / 3),
        "eval/exact_match": pytest.approx(2 / 3),
        "eval/response_length": pytest.approx(7 / 3),
        "eval/truncated": pytest.approx(1 / 3),
    }
    assert [(shown.prompt, shown.response, shown.answer, shown.reward) for shown in result.shown] == [
        ("0>", "12", "12", 1.0),
        ("1>", "9", "98", 0.5),
        ("2>", "5", "5", 1.0),
    ]
    assert result.samples == result.shown
    unanswered = [evolve(prompt, answer="") for prompt in PROMPTS]
    free = evaluated(unanswered, Reward(name="ones", function=lambda prompt, text: 1.0))
    assert "eval/exact_match" not in free.metrics


def test_the_first_three_prompts_are_shown() -> None:
    async def nines(request: GenerateRequest, **_: Any) -> Generation:
        return generation_of([[13, 2]] * len(request))

    result = evaluated([Prompt(index=i, text=f"{i}>", answer="9") for i in range(5)], generate=nines)
    assert [each.prompt for each in result.samples] == ["0>", "1>", "2>", "3>", "4>"]
    assert result.shown == result.samples[:3]


def test_failed_rewards_are_counted_unless_all_fail() -> None:
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


# ---- several samples -------------------------------------------------------------------------------------------------


def test_pass_at_k_counts_choices_with_a_right_sample() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((5, 6)) < np.linspace(0, 1, 5)[:, None]
    found = pass_and_majority(right, np.full((5, 6), None, object))
    assert [name for name in found if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    for k in (1, 2, 4, 6):
        chosen = [row[list(some)].any() for row in right for some in itertools.combinations(range(6), k)]
        assert found[f"pass@{k}"] == pytest.approx(np.mean(chosen))
    assert found["pass@6"] == right.any(1).mean() and found["pass@1"] == pytest.approx(right.mean())


async def by_noise(request: GenerateRequest, **_: Any) -> Generation:
    """Answers one token, a function of the row's noise."""
    return generation_of((4 + request.noise_keys[:, None] % 4).tolist())


def test_named_sets_and_mixed_sources_have_own_metrics() -> None:
    mixed = [evolve(prompt, source=name) for prompt, name in zip(PROMPTS, ["a", "b", "a"], strict=True)]
    digit = Reward(name="digit", function=lambda prompt, text: float(text) / 3)
    found = evaluated(mixed, digit, generate=by_noise, samples=4, correct_from=1.0)
    by_name = evaluated(mixed, digit, generate=by_noise, samples=4, correct_from=1.0, name="aime")
    rewards = np.array([each.reward for each in found.samples]).reshape(3, 4)
    for name, rows in (("", [0, 1, 2]), ("a/", [0, 2]), ("b/", [1])):
        assert found.metrics[f"eval/{name}reward"] == pytest.approx(rewards[rows].mean())
        assert found.metrics[f"eval/{name}pass@4"] == (rewards[rows] == 1).any(1).mean()
        assert found.metrics[f"eval/{name}pass@1"] == pytest.approx((rewards[rows] == 1).mean())
        assert f"eval/{name}majority@4" in found.metrics
    without_sources = {name: value for name, value in found.metrics.items() if name.split("/")[1] not in "ab"}
    assert by_name.metrics == {name.replace("eval/", "eval/aime/"): value for name, value in without_sources.items()}


def test_an_answer_is_right_from_the_parts_value_on() -> None:
    def graded(prompt: Prompt, text: str) -> dict[str, float]:
        if prompt.index == 2:
            raise ValueError("odd")
        return {"right": 0.1 + 0.2 if prompt.index else 0.29, "style": 5.0}

    reward = Reward(name="graded", function=graded, failed_value=9.0)
    common: dict[str, Any] = {"correct_on": "right", "correct_from": 0.30000000000000004}
    assert evaluated(PROMPTS, reward, **common).metrics["eval/pass@1"] == pytest.approx(1 / 3)  # what failed is wrong
    assert evaluated(PROMPTS, reward, correct_from=2.0).metrics["eval/pass@1"] == pytest.approx(2 / 3)  # of the sum
    assert "eval/pass@1" not in evaluated(PROMPTS, reward).metrics
    with pytest.raises(RewardError, match=r"^eval.correct_on: 'rigth' is no part .* 'right', 'style'; did you mean"):
        evaluated(PROMPTS, reward, correct_on="rigth")


def test_a_majority_votes_on_what_the_users_function_reads() -> None:
    def parity(prompt: Prompt, text: str) -> int | None:
        if text == "3":
            raise ValueError("three")
        return int(text) % 2 or None

    right = Reward(name="one", function=lambda prompt, text: float(text == "1"))
    found = evaluated(PROMPTS, right, generate=by_noise, samples=8, extract_answer=parity)
    texts = np.array([each.response for each in found.samples]).reshape(3, 8)
    assert {"1", "3"} <= set(texts.ravel().tolist()) and found.failures == {}
    assert found.first_failure.startswith("eval.answer raised ValueError: three")
    assert found.metrics["eval/majority@8"] == (texts == "1").any(1).mean()  # nothing else votes
    plain = evaluated(PROMPTS, right, generate=by_noise, samples=8).metrics
    assert plain["eval/pass@8"] == found.metrics["eval/pass@8"]
    assert plain["eval/majority@8"] < found.metrics["eval/majority@8"]


@pytest.mark.parametrize(("decides", "right"), [("", 1 / 3), ("asks", 2 / 3), ("solves", 1 / 3)])
def test_of_several_roles_the_named_one_or_the_last_decides(decides: str, right: float) -> None:
    class TwoRoles(Sampler):
        async def generate(self, prompts: Sequence[Prompt], request: GenerateRequest, **how: Any) -> Rollout:
            rollout = await PromptSampler(None, self.context).generate(prompts, request, **how)
            order = np.repeat(np.arange(len(prompts)), 2)
            twice = rollout.take_rows(order)
            batch = twice.batch.with_row_columns(
                episode=np.arange(len(order)), **{ROLE: np.array(["asks", "solves"] * len(prompts))}
            )
            return evolve(twice, batch=batch, outcomes=[1.0, 0.0, 0.0, 1.0, 1.0, 0.0])

    held_out = EvalSet(source=Listed(PROMPTS), params=PARAMS, samples=1, correct_on=decides, correct_from=1.0)
    sampler = TwoRoles(None, prompt_sampler(tokenizer=TOKENIZER, generate=Draws(), seed=0).context)
    found = asyncio.run(evaluate(sampler, held_out, at_once(REWARD))).metrics
    assert found["eval/pass@1"] == pytest.approx(right)
    assert (found["eval/reward/asks"], found["eval/reward/solves"]) == pytest.approx((2 / 3, 1 / 3))
