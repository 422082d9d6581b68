from pathlib import Path

import numpy as np
import pytest
import torch

from corerl.config.schema import ModelConfig
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.errors import CheckpointError, RewardError
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.engine import GenerateRequest, Generation, SamplingParams
from corerl.rollout.engines import FakeConfig
from corerl.rollout.fake_engine import FakeEngine
from corerl.rollout.rewards import resolve_reward
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources import Scored, Synchronous, evaluate
from tests.rollout.models import context, update

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
REWARD = resolve_reward("position-match", {})


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    engine = FakeEngine(ModelConfig(), FakeConfig(), context())
    update([engine], {"w": torch.ones(2)}, version=1, path=tmp_path)
    return Sampler(tokenizer=TOKENIZER, generate=engine.generate, seed=7)


def source(sampler: Sampler, *, steps: int = 4, seed: int = 7) -> Synchronous:
    return Synchronous(
        stream=PromptStream(SortDigits(held_out=10, seed=seed), seed=seed),
        sampler=sampler,
        reward=REWARD,
        params=PARAMS,
        prompts=3,
        samples=2,
        steps=steps,
    )


def same(a: Scored, b: Scored) -> bool:
    return (
        a.step == b.step
        and a.rollout.texts == b.rollout.texts
        and a.rollout.prompts == b.rollout.prompts
        and np.array_equal(a.rewards, b.rewards)
        and np.array_equal(a.rollout.batch.tokens, b.rollout.batch.tokens)
    )


def test_steps_come_in_order_scored_with_fresh_prompts_and_fresh_noise(sampler: Sampler) -> None:
    steps = list(source(sampler))
    assert [scored.step for scored in steps] == [0, 1, 2, 3]
    assert len({prompt.index for scored in steps for prompt in scored.rollout.prompts}) == 12
    for scored in steps:
        expected = [REWARD(scored.rollout.prompts[row // 2], text) for row, text in enumerate(scored.rollout.texts)]
        assert scored.rewards.tolist() == pytest.approx(expected)
        assert scored.exact_match == 0.0
        assert scored.seconds.keys() == {"rollout", "reward"} and min(scored.seconds.values()) >= 0
        assert [shown.response for shown in scored.shown(2)] == [scored.rollout.texts[0], scored.rollout.texts[2]]


def test_a_source_restored_at_a_position_continues_with_the_very_same_samples(sampler: Sampler) -> None:
    whole = list(source(sampler))
    begun = source(sampler)
    next(begun), next(begun)
    position = begun.position
    resumed = source(sampler)
    resumed.restore(position)
    rest = list(resumed)
    assert [scored.step for scored in rest] == [2, 3]
    assert all(same(a, b) for a, b in zip(rest, whole[2:], strict=True))
    with pytest.raises(CheckpointError, match="seed=7"):
        source(sampler, seed=8).restore(position)


def test_a_reward_that_fails_stops_the_step_with_its_sample_named(sampler: Sampler) -> None:
    def odd(prompt: Prompt, response: str) -> float:
        raise RewardError(f"no score for {response!r}")

    broken = Synchronous(
        stream=PromptStream(SortDigits(held_out=10, seed=7), seed=7),
        sampler=sampler,
        reward=odd,
        params=PARAMS,
        prompts=1,
        samples=1,
        steps=1,
    )
    with pytest.raises(RewardError, match="no score for"):
        next(broken)
    assert broken.position["rollout_step"] == 0


def test_evaluation_is_greedy_scored_by_hand_and_counts_exact_answers_where_there_are_any() -> None:
    asked: list[GenerateRequest] = []

    def generate(request: GenerateRequest) -> Generation:  # "12<eos>", "9<eos>", "5<eos>"
        asked.append(request)
        return Generation(
            tokens=np.array([5, 6, 2, 13, 2, 9, 2]),
            offsets=np.array([0, 3, 5, 7]),
            logprobs=np.zeros(7, dtype=np.float32),
            versions=np.ones(7, dtype=np.int64),
            truncated=np.zeros(3, dtype=bool),
        )

    prompts = [Prompt(index=i, text=f"{i}>", answer=answer) for i, answer in enumerate(["12", "98", "5"])]
    result = evaluate(Sampler(tokenizer=TOKENIZER, generate=generate, seed=0), prompts, REWARD, params=PARAMS, show=2)
    assert asked[0].params.greedy and len(asked[0]) == 3
    assert result.metrics == {
        "eval/reward": pytest.approx((1 + 0.5 + 1) / 3),
        "eval/exact_match": pytest.approx(2 / 3),
        "eval/response_length": pytest.approx(7 / 3),
    }
    assert [(shown.prompt, shown.response, shown.answer, shown.reward) for shown in result.shown] == [
        ("0>", "12", "12", 1.0),
        ("1>", "9", "98", 0.5),
    ]
    unanswered = [Prompt(index=i, text=f"{i}>", answer="") for i in range(3)]
    free = evaluate(
        Sampler(tokenizer=TOKENIZER, generate=generate, seed=0), unanswered, lambda prompt, text: 1.0, params=PARAMS
    )
    assert "eval/exact_match" not in free.metrics
