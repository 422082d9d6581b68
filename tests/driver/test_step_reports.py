"""What the samples of a step show, and is reported once."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import AlgorithmConfig
from corerl.driver.metrics import StepNotices
from corerl.plan.algorithm import AlgorithmPlan
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from tests.marked import marked
from tests.rollout.scored import scored


def notices(*, compares: bool = True) -> StepNotices:
    plan = AlgorithmPlan(
        settings=AlgorithmConfig(),
        estimate=None,  # type: ignore[arg-type]  # no step is computed
        passes=(),
        objectives={},
        postprocess=None,
        compares=compares,
    )
    return StepNotices(algorithm=plan)


def said(of: StepNotices, *steps: ScoredRollout) -> list[str]:
    return [line for each in steps for line in of.of(each)]


def test_failed_samples_are_counted_with_the_first_failure() -> None:
    failed = evolve(scored(), failures={"raised": 2, "late": 1}, first_failure="reward 'mine' raised")
    assert said(notices(), failed, scored()) == ["step 0: 3 samples failed; the first: reward 'mine' raised"]


def test_special_tokens_that_the_reward_misses_are_reported_once() -> None:
    batch = scored().rollout.batch
    generated = int(batch.tokens[batch.columns["loss_mask"]][0])
    missing, common = notices(), notices()
    missing.unseen, common.unseen = {generated: "<think>", -1: "<none>"}, {-1: "<none>"}
    (line,) = said(missing, scored(), scored())
    assert line.startswith("samples contain special tokens, such as '<think>', which the reward's text leaves out; set")
    assert said(common, scored()) == []


def with_rewards(*groups: str) -> ScoredRollout:
    """One group for each word, of a sample for each letter."""
    rewards = np.array([float(letter) for word in groups for letter in word], np.float32) / 4
    number = np.repeat(np.arange(len(groups)), [len(word) for word in groups])
    size = len(rewards)
    batch = marked(*"x" * size, of_rows={"group": number, "sample": [0] * size})
    rollout = Rollout(batch=batch, prompts=(), texts=[""] * size)
    return ScoredRollout(step=0, rollout=rollout, rewards=rewards, exact_match=None, seconds={})


def of_roles(roles: str, step: ScoredRollout) -> ScoredRollout:
    """The role of each sample, as a letter."""
    batch = step.rollout.batch.with_row_columns(role=np.array(list(roles)))
    return evolve(step, rollout=evolve(step.rollout, batch=batch))


SAME = with_rewards(*["11"] * 10)
EACH_ITS_OWN = with_rewards(*["11", "22"] * 5)
NEARLY = with_rewards("12", *["11", "22", "33"] * 3)  # 9 of 10
ROLES_ALIKE = of_roles("abab", with_rewards("12", "12"))  # each role's rewards are equal, those of the roles differ
ROLES_APART = of_roles("abab", with_rewards("12", "13"))
ROLES_ALONE = of_roles("ab", with_rewards("12"))
FEWER = with_rewards("12", "12", *["11", "22"] * 4)  # 8 of 10


@pytest.mark.parametrize(
    ("steps", "compares", "counts"),
    [
        ([SAME] * 7, True, "10 of 10"),
        ([SAME, EACH_ITS_OWN, NEARLY], True, "9 of 10"),
        ([*[NEARLY] * 2, FEWER, *[NEARLY] * 3], True, "9 of 10"),
        ([SAME] * 3, False, "10 of 10"),
        ([*[NEARLY] * 2, FEWER, *[NEARLY] * 2], True, ""),
        ([EACH_ITS_OWN] * 5, False, ""),
        ([ROLES_ALIKE] * 3, False, "4 of 4"),
        ([ROLES_APART] * 3, False, ""),
        ([ROLES_ALONE] * 3, False, ""),
    ],
)
def test_equal_rewards_are_reported_once(steps: list[ScoredRollout], compares: bool, counts: str) -> None:
    lines = said(notices(compares=compares), *steps)
    assert [line.partition(":")[0] for line in lines] == [
        f"nearly all groups had equal rewards, 3 steps in a row, now {counts}"
    ] * bool(counts)
