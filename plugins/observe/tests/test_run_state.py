from __future__ import annotations

import math

import pytest
from attrs import evolve

from corerl.plugin import SampleShown
from corerl_observe.run_state import duration, number, prompt_text, rough_duration


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.51249, "rollout/reward", "0.512"),
        (-0.00123, "train/loss", "-0.0012"),
        (9.12e-6, "rollout/logprob_diff", "9.1e-06"),
        (12345.6, "perf/tokens_per_second", "12,346"),
        (10.44, "perf/tokens_per_second", "10"),
        (9.97, "perf/tokens_per_second", "10"),
        (9.94, "perf/tokens_per_second", "9.9"),
        (0.26, "perf/tokens_per_second", "0.3"),
        (123456789.0, "train/grad_norm", "1.2e+08"),
        (math.nan, "train/loss", "nan"),
        (None, "train/loss", "-"),
    ],
)
def test_a_number_reads_as_its_metric_is_read_best(value: float | None, metric: str, text: str) -> None:
    assert number(value, metric) == text


def test_durations_grow_hours_only_when_they_need_them() -> None:
    assert [duration(seconds) for seconds in (6.6, 754, 10800)] == ["0:07", "12:34", "3:00:00"]
    assert [rough_duration(seconds) for seconds in (754, 3599.4, 3599.6, 11100)] == ["12:34", "59:59", "1h00", "3h05"]


def test_marks_leave_the_prompt_whose_pictures_are_shown() -> None:
    text = "user: <picture 3f9a 1312x736><picture 00b1 3x2>Find x < 3."
    given = SampleShown(prompt=text, response="", answer="", reward=0.0)
    assert prompt_text(given) == text
    assert prompt_text(evolve(given, pictures=["3f9a" * 4, "00b1" * 4])) == "user: Find x < 3."
