"""What the samples of a step show of settings, and is said once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import AlgorithmConfig, RewardConfig
from corerl.driver.advantages import TrainBatch
from corerl.driver.step_notices import StepNotices
from corerl.plan.algorithm import BY_ALL_PARTS, AlgorithmPlan
from corerl.rollout.sources.base import Scored
from corerl.types import TURN_REWARDS
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


def said(of: StepNotices, *steps: Scored, trained: bool = True) -> list[str]:
    lines = list[str]()
    for each in steps:
        batch = TrainBatch(samples=each.rollout.batch, metrics={}) if trained else None
        lines += of.of(each, batch, {})
    return lines


def with_parts(**parts: tuple[float, int]) -> Scored:
    return evolve(scored(), parts=parts)


def test_parts_that_only_the_samples_show_are_said_once() -> None:
    line = f"step 0: the reward has the parts 'right', 'length'; {BY_ALL_PARTS}"
    steps = [scored(), with_parts(right=(1.0, 4)), with_parts(**BOTH), with_parts(**BOTH)]
    assert said(notices(algorithm={"dynamic_sampling": 2}), *steps) == [line]
    assert said(notices(), *steps) == []
    assert said(notices(algorithm={"dynamic_sampling": 2, "dynamic_sampling_on": "right"}), steps[2]) == []
    planned = RewardConfig(name="mine:score", weights={"right": 1.0, "length": 0.1})  # said at the start
    assert said(notices(algorithm={"dynamic_sampling": 2}, rewarding=planned), *steps) == []


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


def of_turns(rewards: float, turns: int, *, truncated: bool = False, span: int = 3) -> Scored:
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
