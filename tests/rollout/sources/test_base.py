"""Batches of the next prompts, scored, and filled up with others where some teach nothing."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.data.prompts import Prompt
from corerl.errors import RewardError
from corerl.rollout.rewards.base import Reward, Scorer, Scores
from corerl.rollout.sampler import Rollout
from corerl.rollout.sources.base import BatchSampler, DynamicSampling
from tests.rollout.engines import Engines, at_once
from tests.rollout.sources.drawing import PARAMS, drawing, stream


def test_of_a_chat_all_that_the_model_was_given_is_shown(engines: Engines) -> None:
    scored = engines.run(drawing(engines).batch(0))
    user, system = {"role": "user", "content": "3+4?"}, {"role": "system", "content": "Be brief."}
    chats = tuple(Prompt(index=0, text="3+4?", answer="7", messages=each) for each in ((user,), (system, user), ()))
    shown = evolve(scored, rollout=evolve(scored.rollout, prompts=chats)).shown()
    assert [each.prompt for each in shown] == ["3+4?", "system: Be brief.\nuser: 3+4?", "3+4?"]


def test_the_groups_that_are_taken_come_in_the_order_in_which_they_are_named_with_their_own_rewards(
    engines: Engines,
) -> None:
    whole = engines.run(drawing(engines).batch(0))
    whole = evolve(whole, rewards=np.arange(6, dtype=np.float32))
    taken = whole.take(np.array([2, 0]))
    assert taken.rewards.tolist() == [4.0, 5.0, 0.0, 1.0]
    assert taken.rollout.texts == [whole.rollout.texts[row] for row in (4, 5, 0, 1)]
    assert taken.rollout.prompts == (whole.rollout.prompts[2], whole.rollout.prompts[0])
    assert taken.rollout.batch.rows["group"].tolist() == [0, 0, 1, 1]


def test_the_parts_of_rewards_are_summed_over_all_samples_of_a_step(engines: Engines) -> None:
    weights = {"size": 0.0, "one": 2.0}
    sizes = Reward(name="sizes", function=lambda prompt, text: {"size": len(text), "one": 1}, weights=weights)
    scored = engines.run(refilled(engines, attempts=2, reward=sizes).batch(0))  # which differ in no group
    assert scored.rewards.tolist() == [2.0] * 8
    assert scored.parts["one"] == (24.0, 24)


# ---- dynamic sampling ------------------------------------------------------------------------------------------------


class ByIndex:
    """Half of all prompts have groups whose rewards differ."""

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        groups, samples = rollout.batch.rows["group"], rollout.batch.rows["sample"]
        odd = np.array([rollout.prompts[group].index % 2 for group in groups])
        return Scores(rewards=(odd * samples).astype(np.float32), failures={"raised": 1}, first="the first")


def refilled(engines: Engines, attempts: int, *, reward: Scorer | None = None) -> BatchSampler:
    refill = DynamicSampling(useful=spread, attempts=attempts)
    return drawing(engines, reward=at_once(reward or ByIndex()), prompts=4, refill=refill)


def test_groups_without_spread_are_replaced_by_the_next_prompts_that_have_some(engines: Engines) -> None:
    draws, upcoming = refilled(engines, attempts=20), stream()
    for step in range(3):
        scored = engines.run(draws.batch(step))
        drawn = [prompt for _ in range(scored.counts["attempts"]) for prompt in upcoming.take(4)]
        odd = [prompt for prompt in drawn if prompt.index % 2]
        assert list(scored.rollout.prompts) == odd[:4]
        assert scored.counts["groups_set_aside"] == len(drawn) - len(odd)
        assert (scored.counts["groups_unused"], scored.counts["groups_missing"]) == (len(odd) - 4, 0)
        assert scored.rewards.tolist() == [0.0, 1.0] * 4
        assert scored.rollout.batch.rows["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(scored.rollout.texts) == len(scored.rollout.batch) == 8
        assert (scored.failures, scored.first_failure) == ({"raised": scored.counts["attempts"]}, "the first")


def test_what_is_missing_at_the_end_is_filled_with_groups_that_had_been_dropped(engines: Engines) -> None:
    class Never:
        def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
            return Scores(rewards=np.ones(len(rollout.batch), np.float32), failures={}, first="")

    scored = engines.run(refilled(engines, attempts=2, reward=Never()).batch(0))
    assert scored.counts == {
        "attempts": 3,
        "groups_set_aside": 12,
        "groups_unused": 0,
        "groups_missing": 4,
    }
    assert len(scored.rollout.prompts) == 4 and len(scored.rollout.batch) == 8


def by_parts(prompt: Prompt, response: str) -> dict[str, float]:
    """A length that differs, and an outcome that differs for prompts of odd numbers alone."""
    return {"right": float(prompt.index % 2 * (len(response) > 3)), "length": 0.1 * len(response)}


@pytest.mark.parametrize("weights", [{}, {"right": 0.0, "length": 1.0}])
def test_a_part_of_the_reward_decides_which_groups_are_replaced(engines: Engines, weights: dict[str, float]) -> None:
    reward = Reward(name="parts", function=by_parts, weights=weights)
    refill = DynamicSampling(useful=spread, attempts=40, part="right")
    draws = drawing(engines, reward=at_once(reward), prompts=4, samples=6, refill=refill)
    scored = engines.run(draws.batch(0))
    for rewards, texts in zip(scored.rewards.reshape(4, 6), np.array(scored.rollout.texts).reshape(4, 6), strict=True):
        sizes = np.array([len(text) for text in texts])
        right = weights.get("right", 1.0) * (sizes > 3)
        np.testing.assert_allclose(rewards, right + 0.1 * sizes, rtol=1e-6)
    assert all(prompt.index % 2 for prompt in scored.rollout.prompts) and scored.counts["groups_missing"] == 0
    by_sum = drawing(engines, reward=at_once(reward), prompts=4, samples=6, refill=evolve(refill, part=""))
    assert engines.run(by_sum.batch(0)).counts["groups_set_aside"] < scored.counts["groups_set_aside"]


def test_a_part_that_no_reward_has_ends_the_run_with_its_names(engines: Engines) -> None:
    refill = DynamicSampling(useful=spread, attempts=1, part="rigth")
    for function, told in ((by_parts, "its parts are 'right', 'length'; did you mean 'right'?"), (len_of, "no parts")):
        draws = drawing(engines, reward=at_once(Reward(name="parts", function=function)), refill=refill)
        with pytest.raises(RewardError) as caught:
            engines.run(draws.batch(0))
        assert caught.value.message.startswith("algorithm.dynamic_sampling_on: 'rigth' is no part of the reward; ")
        assert caught.value.message.endswith(told)


def test_a_part_that_earlier_samples_had_may_be_lacking_later() -> None:
    refill = DynamicSampling(useful=spread, attempts=1, part="right")
    rewards, right = np.array([0.5, 0.25], np.float32), np.array([1.0, np.nan], np.float32)
    other = Scores(rewards=rewards, values={"length": rewards})
    with pytest.raises(RewardError):
        refill.deciding(other)
    assert refill.deciding(Scores(rewards=rewards, values={"right": right})).tolist() == [1.0, 0.25]
    assert refill.deciding(other).tolist() == [0.5, 0.25]


def len_of(prompt: Prompt, response: str) -> float:
    return float(len(response))


def test_a_prompt_that_is_drawn_again_in_one_step_draws_other_noise(engines: Engines) -> None:
    prompt = [Prompt(index=5, text="00005>", answer="00005")]
    sampler = drawing(engines).sampler

    def texts(**attempt: int) -> list[str]:
        return engines.run(sampler.sample(prompt, rollout_step=0, samples=2, params=PARAMS, **attempt)).texts

    assert texts(attempt=0) == texts() != texts(attempt=1)
    # Also where it comes twice in each attempt.
    requests = [
        sampler.request(prompt * 2, rollout_step=0, samples=2, params=PARAMS, attempt=attempt) for attempt in range(3)
    ]
    assert len({key for each in requests for key in each.noise_keys.tolist()}) == 3 * 2 * 2
