"""What the samples of a step show, and is reported once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.driver.metrics import StepNotices
from corerl.rollout.scored import ScoredRollout
from corerl.types import SampleBatch
from tests.marked import marked
from tests.rollout.scored import scored


def said(of: StepNotices, *steps: ScoredRollout) -> list[str]:
    return [line for each in steps for line in of.of(each, None)]


def test_failed_samples_are_counted_with_the_first_failure() -> None:
    failed = evolve(scored(), failures={"raised": 2, "late": 1}, first_failure="reward 'mine' raised")
    assert said(StepNotices(), failed, scored()) == ["step 0: 3 samples failed; the first: reward 'mine' raised"]


def test_special_tokens_that_the_reward_misses_are_reported_once() -> None:
    batch = scored().rollout.batch
    generated = int(batch.tokens[batch.columns["loss_mask"]][0])
    missing, common = StepNotices(), StepNotices()
    missing.unseen, common.unseen = {generated: "<think>", -1: "<none>"}, {-1: "<none>"}
    (line,) = said(missing, scored(), scored())
    assert line.startswith("samples contain special tokens, such as '<think>', which the reward's text leaves out; set")
    assert said(common, scored()) == []


def cut_off(count: int, *, tokens: int = 7) -> ScoredRollout:
    """Ten samples of so many tokens, of which the first `count` reached the limit."""
    rows: dict[str, list[Any]] = {
        "group": [0] * 10,
        "sample": list(range(10)),
        "truncated": [each < count for each in range(10)],
    }
    batch = marked(*["." + "x" * tokens] * 10, of_rows=rows)
    return evolve(scored(), rollout=evolve(scored().rollout, batch=batch))


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        ([cut_off(10), *[cut_off(9)] * 6], "90%"),
        ([*[cut_off(9)] * 2, cut_off(8), *[cut_off(9)] * 2], ""),
        ([cut_off(10, tokens=1)] * 3, ""),
    ],
)
def test_samples_that_are_cut_off_are_reported_once(steps: list[ScoredRollout], share: str) -> None:
    assert [line.partition(":")[0] for line in said(StepNotices(), *steps)] == [
        f"nearly all samples reached rollout.max_tokens, 3 steps in a row, now {share}"
    ] * bool(share)
    assert said(StepNotices(sampled=False), *steps) == []  # another run's limit is not this one's to raise


def trained(*groups: str, roles: str = "") -> SampleBatch:
    """One group for each word, of a sample for each letter: a token without loss, then one with this advantage."""
    letters = "".join(groups)
    rows = {"group": np.repeat(np.arange(len(groups)), [len(word) for word in groups]).tolist()}
    given: dict[str, list[Any]] = {**rows, **({"role": list(roles)} if roles else {})}
    advantages = [each for letter in letters for each in (0.0, float(letter))]
    return marked(*[".x"] * len(letters), of_rows=given, advantages=advantages)


ZERO = trained(*["00"] * 10)
NEARLY = trained("12", *["00"] * 9)
FEWER = trained("10", "01", *["00"] * 8)


@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        ([ZERO] * 7, "10 of 10"),
        ([ZERO, None, ZERO, NEARLY], "9 of 10"),  # one was not for training
        ([*[NEARLY] * 2, FEWER, *[NEARLY] * 3], "9 of 10"),
        ([*[NEARLY] * 2, FEWER, *[NEARLY] * 2], ""),
        ([trained("01" * 9, roles="ab" * 9)] * 3, ""),  # each role's samples of a prompt are a group
        ([trained("0" * 20, "0" * 9 + "1", roles="abcdefghij" * 3)] * 3, "19 of 20"),
    ],
)
def test_steps_that_teach_nothing_are_reported_once(steps: list[SampleBatch | None], counts: str) -> None:
    reports = StepNotices()
    lines = [line for step in steps for line in reports.of(scored(), step)]
    assert [line.partition(":")[0] for line in lines] == [
        f"nearly all groups had advantages of 0, 3 steps in a row, now {counts}"
    ] * bool(counts)
