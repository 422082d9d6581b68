"""What the newest steps of a run say about it."""

from __future__ import annotations

import pytest

from corerl_page.findings import findings

CONFIG = {"rollout": {"max_tokens": 3}, "algorithm": {"mismatch_bound": 0.0}}


def found(**metrics: list[float | None]) -> list[tuple[str, str]]:
    by_step = {name.replace("__", "/"): dict(enumerate(values)) for name, values in metrics.items()}
    return [(each.level, each.what) for each in findings(by_step, CONFIG)]


def test_a_run_without_trouble_has_none() -> None:
    assert found(rollout__truncated=[0.9] * 30 + [0.01] * 10, rollout__logprob_diff=[1e-7] * 40) == []


def test_cut_off_answers_name_the_limit() -> None:
    ((level, what),) = found(rollout__truncated=[0.0, *[0.75] * 10], rollout__response_length=[2.9] * 11)
    assert level == "error"
    assert what == "75% of samples are cut off at rollout.max_tokens = 3; their mean length is 2.9 tokens"


@pytest.mark.parametrize(("mean", "levels"), [(0.009, []), (0.02, ["warning"]), (0.4, ["error"])])
def test_a_mismatch_is_graver_the_larger_it_is(mean: float, levels: list[str]) -> None:
    assert [level for level, _ in found(rollout__logprob_diff=[mean])] == levels


def test_the_gravest_comes_first() -> None:
    levels = [
        level
        for level, _ in found(
            time__step=[1.0],
            idle__ranks__total=[0.8],
            idle__ranks__samples=[0.7],
            rollout__groups_without_spread=[0.9],
            train__skipped_steps=[1.0],
        )
    ]
    assert levels == ["error", "warning", "info"]


def test_values_that_are_not_finite_are_left_out() -> None:
    assert found(rollout__truncated=[None, None], rollout__logprob_diff=[None]) == []
