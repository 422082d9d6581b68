from __future__ import annotations

import math
from pathlib import Path

import pytest
from attrs import evolve

from corerl.errors import DataError
from corerl.plugin import SampleShown
from corerl_observe.run_state import History, duration, number, phases, prompt_text, rough_duration


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
        (1234567.0, "train/grad_norm", "1.2e+06"),
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


def test_a_killed_runs_file_is_read_up_to_its_tear(tmp_path: Path) -> None:
    torn = '{"step": 0, "a": 1.5}\n{"step": 1, "a": null}\n{"step": 2, "a": 7.0}\n{"st'
    (tmp_path / "metrics.jsonl").write_text(torn)
    history = History.read(str(tmp_path), before=2)
    steps, values = history.series("a")
    assert steps == [0, 1]
    assert values[0] == 1.5 and math.isnan(values[1])
    assert history.series("b") == ([], [])


@pytest.mark.parametrize("line", [b"what?", b"[1]", b'{"a": 1}', b'{"step": 1, "a": "\xff"}', b'{"step": Infinity}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line + b"\n")
    shown = repr(line.partition(b"\xff")[0].decode())[:-1]
    with pytest.raises(DataError) as caught:
        History.read(str(tmp_path), before=9)
    assert str(caught.value).startswith(f"{tmp_path}/metrics.jsonl:2: {shown}")
    assert str(caught.value).endswith(" is not an object with a step; fix or delete the line")
    assert History.read(str(tmp_path), before=0).names() == []  # of a run that begins anew


def test_a_step_without_the_phase_counts_as_nothing() -> None:
    history = History()
    for step in range(10):
        history.add(step, {"time/train": 2.0, "time/step": 3.0})
    history.add(9, {"time/save": 6.0})
    assert history.recent("time/train", 4) == 2.0
    assert history.recent("time/save", 4) == 1.5
    assert history.recent("time/train", 100) == 2.0
    assert phases(history) == ["train", "save"]
    assert History().recent("time/train", 4) == 0.0


def test_unknown_and_unfinished_steps_are_not_counted() -> None:
    history = History()
    for step in (100, 101):  # resumed elsewhere
        history.add(step, {"time/train": 2.0, "time/step": 3.0})
    history.add(102, {"eval/reward": 0.5, "time/eval": 1.0})  # before the step
    assert history.recent("time/train", 20) == 2.0


def test_ends_of_a_run_are_means_but_for_evaluations() -> None:
    history = History()
    for step in range(60):
        history.add(step, {"a": float(step), "b": math.nan if step % 2 else 1.0})
    history.add(0, {"once": 2.0})
    history.add(7, {"late": 3.0})
    for step in (0, 30, 60):
        history.add(step, {"eval/reward": step / 60})
    headings, ends = history.ends(["a", "b", "once", "late", "eval/reward", "none"])
    assert headings == ["means of 10 steps", "start", "end"]
    of_one_value = {"once": [2.0, None], "late": [None, 3.0]}
    assert ends == {"a": [4.5, 54.5], "b": [1.0, 1.0], **of_one_value, "eval/reward": [0.0, 1.0]}


def test_a_history_that_is_rewound_knows_the_steps_before_alone() -> None:
    history = History()
    for step in range(4):
        history.add(step, {"loss": float(step), **({"eval/reward": 0.5} if step == 3 else {})})
    history.rewind(2)
    assert history.series("loss") == ([0, 1], [0.0, 1.0]) and history.names() == ["loss"]
    history.add(2, {"loss": 7.0})
    assert history.last("loss") == 7.0
