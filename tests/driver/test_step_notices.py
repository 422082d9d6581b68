"""What the samples of a step show of settings, and is said once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import AlgorithmConfig
from corerl.driver.advantages import TrainBatch
from corerl.driver.step_notices import StepNotices
from corerl.plan.algorithm import AlgorithmPlan
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.types import TURN_REWARDS, SampleBatch
from tests.rollout.scored import scored

BOTH = {"right": (1.0, 4), "length": (0.5, 4)}


def notices(*, compares: bool = True, credits_turns: bool = False, algorithm: Any = None, **more: Any) -> StepNotices:
    plan = AlgorithmPlan(
        settings=AlgorithmConfig(**algorithm or {}),
        estimate=None,  # type: ignore[arg-type]  # no step is computed
        passes=(),
        objectives={},
        postprocess=None,
        compares=compares,
        credits_turns=credits_turns,
    )
    return StepNotices(algorithm=plan, **{"samples": True, **more})


def said(of: StepNotices, *steps: ScoredRollout, trained: bool = True) -> list[str]:
    lines = list[str]()
    for each in steps:
        batch = TrainBatch(samples=each.rollout.batch, metrics={}) if trained else None
        lines += of.of(each, batch, {})
    return lines


def with_parts(**parts: tuple[float, int]) -> ScoredRollout:
    return evolve(scored(), parts=parts)


def test_parts_that_only_the_samples_show_are_said_once() -> None:
    line = (
        "step 0: the reward has the parts 'right', 'length'; groups are equal where the sums of all parts are; name "
        "the part that decides in algorithm.dynamic_sampling_on, if one does"
    )
    steps = [scored(), with_parts(right=(1.0, 4)), with_parts(**BOTH), with_parts(**BOTH)]
    assert said(notices(algorithm={"dynamic_sampling": 2}), *steps) == [line]
    assert said(notices(), *steps) == []
    assert said(notices(algorithm={"dynamic_sampling": 2, "dynamic_sampling_on": "right"}), steps[2]) == []


def test_a_step_without_the_part_that_decides_is_said_once() -> None:
    of = notices(algorithm={"dynamic_sampling": 2, "dynamic_sampling_on": "right"})
    lacking = with_parts(length=(0.5, 4))
    line = (
        "step 0: no sample has the part 'right' of the reward (algorithm.dynamic_sampling_on), only 'length': groups "
        "are equal where their whole rewards are"
    )
    assert said(of, with_parts(**BOTH), lacking, lacking) == [line]


@pytest.mark.parametrize("compares", [True, False])
def test_groups_equal_in_the_part_that_decides_are_said_to_teach_the_rest(compares: bool) -> None:
    of = notices(compares=compares, algorithm={"dynamic_sampling": 2, "dynamic_sampling_on": "right"})
    full, short = (evolve(with_parts(**BOTH), counts={"groups_missing": missing}) for missing in (0, 1))
    line = (
        "step 0: 1 of 2 groups are equal in 'right', and too few others were found (algorithm.dynamic_sampling=2): "
        "the policy learns from them what else differs in their rewards; rollout/groups_missing counts such groups"
    )
    assert said(of, full, short, short) == [line] * compares


def of_turns(rewards: float, turns: int, *, truncated: bool = False, span: int = 3) -> ScoredRollout:
    step = scored()
    batch = step.rollout.batch
    columns = {**batch.columns, TURN_REWARDS: np.full(len(batch.tokens), rewards, np.float32)}
    rows = {"turns": np.full(4, turns), "span": np.full(4, span), "truncated": np.array([truncated, *[False] * 3])}
    return evolve(step, rollout=evolve(step.rollout, batch=evolve(batch, columns=columns, rows={**batch.rows, **rows})))


def test_rewards_of_turns_that_an_algorithm_only_adds_up_are_said_once() -> None:
    line = (
        "step 0: the rewards of an episode's turns are only added up by algorithm.name='grpo', and all tokens of an "
        "episode get one advantage; to credit each turn with its own, use an algorithm whose spec says "
        "credits_turns, or algorithm.advantages"
    )
    assert said(notices(), of_turns(0.0, 2), of_turns(0.5, 1), of_turns(0.5, 2), of_turns(0.5, 2)) == [line]
    assert said(notices(credits_turns=True), of_turns(0.5, 2)) == []
    assert said(notices(algorithm={"advantages": "mine:advantages"}), of_turns(0.5, 2)) == []
    assert said(notices(), of_turns(0.5, 2), trained=False) == []


def test_rows_that_something_else_than_answers_filled_are_said_once() -> None:
    filled, cut = of_turns(0.0, 2, truncated=True), of_turns(0.0, 2, truncated=True, span=8)
    line = (
        "step 0: 1 of 4 rows ended since what came behind an answer, such as a tool's result, left no room in "
        "rollout.max_tokens=8; they count as truncated, also for algorithm.overlong"
    )
    assert said(notices(max_tokens=8), of_turns(0.0, 2), cut, filled, filled) == [line]
    assert said(notices(), filled) == []


# ---- equal rewards ---------------------------------------------------------------------------------------------------

OTHERS = "set algorithm.dynamic_sampling, which samples other prompts in their place, or "


def with_rewards(*groups: str) -> ScoredRollout:
    """One group for each word, of a sample for each letter."""
    rewards = np.array([float(letter) for word in groups for letter in word], np.float32) / 4
    number = np.repeat(np.arange(len(groups)), [len(word) for word in groups])
    size = len(rewards)
    batch = SampleBatch(
        tokens=np.arange(size),
        offsets=np.arange(size + 1),
        columns={"loss_mask": np.ones(size, np.bool_)},
        rows={"group": number, "sample": np.zeros(size, np.int64)},
    )
    rollout = Rollout(batch=batch, prompts=(), texts=[""] * size)
    return ScoredRollout(step=0, rollout=rollout, rewards=rewards, exact_match=None, seconds={})


SAME = with_rewards(*["11"] * 10)
EACH_ITS_OWN = with_rewards(*["11", "22"] * 5)
NEARLY = with_rewards("12", *["11", "22", "33"] * 3)  # 9 of 10
FEWER = with_rewards("12", "12", *["11", "22"] * 4)  # 8 of 10


@pytest.mark.parametrize(
    ("steps", "more", "counts", "cure"),
    [
        ([SAME] * 5, {}, "10 of 10, all 0.25", OTHERS),
        ([SAME, EACH_ITS_OWN, NEARLY], {}, "9 of 10", OTHERS),
        ([*[NEARLY] * 3, FEWER, *[NEARLY] * 3], {"samples": False}, "9 of 10", ""),
        ([NEARLY] * 3, {"algorithm": {"dynamic_sampling": 2}}, "9 of 10", "raise algorithm.dynamic_sampling=2, or "),
        ([SAME] * 3, {"compares": False}, "10 of 10, all 0.25", ""),
        ([*[NEARLY] * 2, FEWER, *[NEARLY] * 2], {}, "", ""),
        ([EACH_ITS_OWN] * 5, {"compares": False}, "", ""),
    ],
)
def test_equal_rewards_are_reported_once(
    steps: list[ScoredRollout], more: dict[str, Any], counts: str, cure: str
) -> None:
    line = (
        f"nearly all groups had equal rewards, 3 steps in a row, now {counts}: nothing is learned from these; check "
        f"reward.name, data.answer_key and the samples; if these are right, {cure}use prompts that this model answers "
        "right sometimes"
    )
    assert said(notices(**more), *steps) == [line] * bool(counts)


def test_shorter_answers_are_learned_from_equal_rewards() -> None:
    (line,) = said(notices(algorithm={"overlong": "penalty", "overlong_buffer": 2}), *[SAME] * 3)
    assert "nothing but shorter answers is learned from these" in line
