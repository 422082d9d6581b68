from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.config.schema import ModelConfig
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.engines.fake import FakeEngine
from corerl.engines.specs import FakeConfig
from corerl.errors import CheckpointError, RewardError
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.rewards.base import Reward, Scorer, Scores
from corerl.rollout.rewards.lookup import resolve_reward
from corerl.rollout.sampler import Rollout, Sampler
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Scored, Synchronous, evaluate
from tests.engines.models import context, update

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
REWARD = resolve_reward("position-match", {})


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    engine = FakeEngine(ModelConfig(), FakeConfig(), context())
    update([engine], {"w": torch.ones(2)}, version=1, path=tmp_path)
    return Sampler(tokenizer=TOKENIZER, generate=engine.generate, seed=7)


def source(sampler: Sampler, *, steps: int = 4, seed: int = 7, reward: Scorer = REWARD) -> Synchronous:
    draws = BatchSampler(
        stream=PromptStream(SortDigits(held_out=10, seed=seed), seed=seed),
        sampler=sampler,
        reward=reward,
        params=PARAMS,
        prompts=3,
        samples=2,
    )
    return Synchronous(draws, steps=steps)


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
        assert scored.seconds.keys() == {"rollout", "reward"}
        assert [shown.response for shown in scored.shown(2)] == [scored.rollout.texts[0], scored.rollout.texts[2]]
        every = scored.samples()
        assert [each.response for each in every] == scored.rollout.texts
        assert [each.prompt for each in every[::2]] == [prompt.text for prompt in scored.rollout.prompts]
        assert [each.reward for each in every] == scored.rewards.tolist()


def test_of_a_chat_all_that_the_model_was_given_is_shown(sampler: Sampler) -> None:
    scored = next(iter(source(sampler)))
    user, system = {"role": "user", "content": "3+4?"}, {"role": "system", "content": "Be brief."}
    chats = tuple(Prompt(index=0, text="3+4?", answer="7", messages=each) for each in ((user,), (system, user), ()))
    shown = evolve(scored, rollout=evolve(scored.rollout, prompts=chats)).shown()
    assert [each.prompt for each in shown] == ["3+4?", "system: Be brief.\nuser: 3+4?", "3+4?"]


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


def test_failures_of_the_reward_travel_with_the_step_and_a_broken_reward_stops_it(sampler: Sampler) -> None:
    calls = iter(range(12))

    def odd(prompt: Prompt, response: str) -> float:
        if next(calls) not in (0, 2, 3, 5):  # of the first step samples 1 and 4, of the second all
            raise ValueError("odd")
        return 0.5

    begun = source(sampler, reward=Reward(name="odd", function=odd, failed_value=-1.0))
    scored = next(begun)
    assert scored.rewards.tolist() == [0.5, -1.0, 0.5, 0.5, -1.0, 0.5]
    assert scored.failures == {"raised": 2}
    prompt = scored.rollout.prompts[0]
    line = odd.__code__.co_firstlineno + 2
    assert scored.first_failure == (
        f"reward 'odd' raised ValueError: odd (tests/rollout/sources/test_base.py:{line}) on prompt {prompt.index} "
        f"({prompt.text!r}) with the response {scored.rollout.texts[1]!r}"
    )
    assert begun.position["rollout_step"] == 1
    with pytest.raises(RewardError, match="raised ValueError: odd .* all 6 samples failed"):
        next(begun)
    assert begun.position["rollout_step"] == 1


def test_the_parts_of_rewards_are_summed_over_all_samples_of_a_step_and_told_by_an_evaluation(
    sampler: Sampler,
) -> None:
    weights = {"size": 0.0, "one": 2.0}
    sizes = Reward(name="sizes", function=lambda prompt, text: {"size": len(text), "one": 1}, weights=weights)
    scored = next(refilled(sampler, attempts=2, reward=sizes))  # which differ in no group
    assert scored.rewards.tolist() == [2.0] * 8
    assert scored.parts["one"] == (24.0, 24)
    prompts = scored.rollout.prompts
    evaluation = evaluate(sampler, prompts, sizes, params=PARAMS, show=len(prompts))
    assert evaluation.metrics["eval/reward/one"] == 1.0
    assert evaluation.metrics["eval/reward/size"] == np.mean([len(shown.response) for shown in evaluation.shown])


def test_the_groups_that_are_taken_come_in_the_order_in_which_they_are_named_with_their_own_rewards(
    sampler: Sampler,
) -> None:
    whole = next(source(sampler))
    whole = evolve(whole, rewards=np.arange(6, dtype=np.float32))
    taken = whole.take(np.array([2, 0]))
    assert taken.rewards.tolist() == [4.0, 5.0, 0.0, 1.0]
    assert taken.rollout.texts == [whole.rollout.texts[row] for row in (4, 5, 0, 1)]
    assert taken.rollout.prompts == (whole.rollout.prompts[2], whole.rollout.prompts[0])
    assert taken.rollout.batch.rows["group"].tolist() == [0, 0, 1, 1]


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
    params = evolve(PARAMS, routed_experts=True)  # which are of no use to who trains on nothing
    result = evaluate(Sampler(tokenizer=TOKENIZER, generate=generate, seed=0), prompts, REWARD, params=params, show=2)
    assert asked[0].params == evolve(PARAMS, greedy=True) and len(asked[0]) == 3
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
    unanswered = [Prompt(index=i, text=f"{i}>", answer="") for i in range(3)]
    ones = Reward(name="ones", function=lambda prompt, text: 1.0)
    free = evaluate(Sampler(tokenizer=TOKENIZER, generate=generate, seed=0), unanswered, ones, params=PARAMS)
    assert "eval/exact_match" not in free.metrics
    mixed = [evolve(prompt, source=name) for prompt, name in zip(prompts, ["a", "b", "a"], strict=True)]
    parts = evaluate(Sampler(tokenizer=TOKENIZER, generate=generate, seed=0), mixed, REWARD, params=PARAMS)
    assert (parts.metrics["eval/a/reward"], parts.metrics["eval/b/reward"]) == (1.0, 0.5)


# ---- dynamic sampling ------------------------------------------------------------------------------------------------


class ByIndex:
    """Half of all prompts have groups whose rewards differ."""

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        groups, samples = rollout.batch.rows["group"], rollout.batch.rows["sample"]
        odd = np.array([rollout.prompts[group].index % 2 for group in groups])
        return Scores(rewards=(odd * samples).astype(np.float32), failures={"raised": 1}, first="the first")


def refilled(sampler: Sampler, attempts: int, *, reward: Scorer | None = None, prompts: int = 4) -> Synchronous:
    draws = BatchSampler(
        stream=PromptStream(SortDigits(held_out=10, seed=7), seed=7),
        sampler=sampler,
        reward=reward or ByIndex(),
        params=PARAMS,
        prompts=prompts,
        samples=2,
        refill=DynamicSampling(useful=spread, attempts=attempts),
    )
    return Synchronous(draws, steps=3)


def test_groups_without_spread_are_replaced_by_the_next_prompts_that_have_some(sampler: Sampler) -> None:
    upcoming = PromptStream(SortDigits(held_out=10, seed=7), seed=7)
    for scored in refilled(sampler, attempts=20):
        drawn = [prompt for _ in range(scored.counts["attempts"]) for prompt in upcoming.take(4)]
        odd = [prompt for prompt in drawn if prompt.index % 2]
        assert list(scored.rollout.prompts) == odd[:4]
        assert scored.counts["groups_set_aside"] == len(drawn) - len(odd)
        assert (scored.counts["groups_unused"], scored.counts["groups_missing"]) == (len(odd) - 4, 0)
        assert scored.rewards.tolist() == [0.0, 1.0] * 4
        assert scored.rollout.batch.rows["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(scored.rollout.texts) == len(scored.rollout.batch) == 8
        assert (scored.failures, scored.first_failure) == ({"raised": scored.counts["attempts"]}, "the first")


def test_what_is_missing_at_the_end_is_filled_with_groups_that_had_been_dropped(sampler: Sampler) -> None:
    class Never:
        def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
            return Scores(rewards=np.ones(len(rollout.batch), np.float32), failures={}, first="")

    scored = next(refilled(sampler, attempts=2, reward=Never()))
    assert scored.counts == {
        "attempts": 3,
        "groups_set_aside": 12,
        "groups_unused": 0,
        "groups_missing": 4,
    }
    assert len(scored.rollout.prompts) == 4 and len(scored.rollout.batch) == 8


def test_a_prompt_that_is_drawn_again_in_one_step_draws_other_noise(sampler: Sampler) -> None:
    prompt = [Prompt(index=5, text="00005>", answer="00005")]
    texts = [
        sampler.sample(prompt, rollout_step=0, samples=2, params=PARAMS, attempt=attempt).texts for attempt in (0, 1)
    ]
    assert texts[0] != texts[1]
    assert texts[0] == sampler.sample(prompt, rollout_step=0, samples=2, params=PARAMS).texts
    # Also where it comes twice in each attempt.
    requests = [
        sampler.request(prompt * 2, rollout_step=0, samples=2, params=PARAMS, attempt=attempt) for attempt in range(3)
    ]
    assert len({key for each in requests for key in each.noise_keys.tolist()}) == 3 * 2 * 2


def test_a_refilled_run_resumes_where_it_stood(sampler: Sampler) -> None:
    steps = list(refilled(sampler, attempts=3))
    first = refilled(sampler, attempts=3)
    next(first)
    resumed = refilled(sampler, attempts=3)
    resumed.restore(first.position)
    assert [same(a, b) for a, b in zip(list(resumed), steps[1:], strict=True)] == [True, True]
