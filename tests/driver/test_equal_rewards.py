from __future__ import annotations

from typing import Any

import numpy as np

from corerl.config.schema import AlgorithmConfig
from corerl.driver.equal_rewards import EqualRewards, without_spread

CONSTANT = (
    "all samples of a step had the same reward, 3 steps in a row, now 0.25: nothing is learned from that; check "
    "reward.name, data.answer_key and the samples; if these are right, {}"
)
EQUAL = "in the last 3 steps, the samples of {} groups had equal rewards: nothing is learned from these; {}"
OTHERS = "use prompts that this model answers right sometimes"
SET = "set algorithm.dynamic_sampling, which samples other prompts in their place, or " + OTHERS
RAISE = "raise algorithm.dynamic_sampling=2, the times that other prompts are sampled instead, or " + OTHERS


def step(*rewards: str) -> tuple[Any, Any]:
    """One group for each word, of a sample for each letter."""
    values = [float(letter) for word in rewards for letter in word]
    return np.array(values, np.float32) / 4, np.repeat(np.arange(len(rewards)), [len(word) for word in rewards])


SAME = step(*["11"] * 10)
EACH_ITS_OWN = step(*["11", "22"] * 5)
NEARLY = step("12", *["11", "22", "33"] * 3)  # 9 of 10
FEWER = step("12", "12", *["11", "22"] * 4)  # 8 of 10


def told(*steps: tuple[Any, Any], compares: bool = True, samples: bool = True, **algorithm: Any) -> list[str]:
    equal = EqualRewards(AlgorithmConfig(**algorithm), compares=compares, samples=samples)
    return [equal.update(*each) for each in steps]


def test_groups_are_counted_by_their_numbers_of_which_some_may_be_gone() -> None:
    assert without_spread(np.array([1.0, 0.0, 0.5, 0.5, 0.5]), np.array([4, 4, 7, 7, 9])) == (2, 3)


def test_one_reward_for_all_is_told_each_time_that_it_has_lasted_three_steps() -> None:
    line = CONSTANT.format(SET)
    assert told(*[SAME] * 5, FEWER, *[SAME] * 3) == ["", "", line, "", "", "", "", "", line]
    assert told(*[SAME] * 3, dynamic_sampling=2)[-1] == CONSTANT.format(RAISE)


def test_a_run_of_saved_batches_is_told_of_no_setting_that_samples_others() -> None:
    assert told(*[SAME] * 3, samples=False)[-1] == CONSTANT.format(OTHERS)
    assert told(*[NEARLY] * 3, samples=False)[-1] == EQUAL.format("27 of 30", OTHERS)


def test_groups_of_equal_rewards_are_told_once_with_what_samples_others() -> None:
    assert told(*[EACH_ITS_OWN] * 4, FEWER, *[EACH_ITS_OWN] * 3) == ["", "", EQUAL.format("30 of 30", SET), *[""] * 5]
    assert told(NEARLY, EACH_ITS_OWN, NEARLY)[-1] == EQUAL.format("28 of 30", SET)
    assert told(*[NEARLY] * 3, dynamic_sampling=2)[-1] == EQUAL.format("27 of 30", RAISE)


def test_what_lasts_less_than_three_steps_and_what_teaches_is_not_told() -> None:
    assert not any(told(*[NEARLY] * 2, FEWER, *[NEARLY] * 2))
    assert not any(told(*[FEWER] * 9))


def test_samples_that_are_all_alike_are_not_told_as_groups_too() -> None:
    assert told(EACH_ITS_OWN, *[SAME] * 4) == ["", "", "", CONSTANT.format(SET), ""]
    assert told(*[SAME] * 3, NEARLY)[-2:] == [CONSTANT.format(SET), EQUAL.format("29 of 30", SET)]


def test_where_long_answers_are_worth_less_that_is_learned_all_the_same() -> None:
    penalty = {"overlong": "penalty", "overlong_buffer": 2}
    length = "nothing but shorter answers is learned"
    for steps, line in (([SAME] * 3, CONSTANT.format(SET)), ([EACH_ITS_OWN] * 3, EQUAL.format("30 of 30", SET))):
        assert told(*steps, **penalty)[-1] == line.replace("nothing is learned", length)


def test_where_groups_of_equal_rewards_teach_only_one_reward_for_all_is_told() -> None:
    assert not any(told(*[EACH_ITS_OWN] * 5, compares=False))
    assert told(*[SAME] * 3, compares=False)[-1] == CONSTANT.format(OTHERS)
    alone = step("1", "2", "1")  # as with a single sample per prompt
    assert not any(told(*[alone] * 5, compares=False))
