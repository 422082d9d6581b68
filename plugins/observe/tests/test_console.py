from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from attrs import evolve

from corerl.plugin import (
    Evaluated,
    Event,
    Notice,
    PhaseProgress,
    PhaseStarted,
    RunFinished,
    RunRewound,
    SampleShown,
    StepFinished,
)
from corerl_observe.console import Console, PlainView
from corerl_observe.run_state import RunState
from corerl_observe.specs import ConsoleOptions
from tests.observability.run import Clock, evaluated, metrics, shown, started, steps, whole


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "term", "lines"), [(Tty, "xterm", 0), (Tty, "dumb", 1), (io.StringIO, "xterm", 1)])
def test_an_able_terminal_gets_the_live_display(
    monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO], term: str, lines: int
) -> None:
    stream = kind()
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdout", stream)
    shows = Console(options=ConsoleOptions(), run_dir="runs/small")
    for event in whole("runs/small"):
        shows.observe(event)
    shows.shutdown("finished")
    assert "finished after 4 of 4 steps" in stream.getvalue()
    assert stream.getvalue().count("checkpoint after 4 steps: ") == lines


def test_what_a_log_cannot_encode_is_escaped() -> None:
    view = PlainView(RunState(Clock()), io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"), every=1)
    view.update(Notice(text="\u00e9\x1b[2J"))
    assert written.getvalue() == b"note: \\xe9\\x1b[2J\n"


def lines(events: list[Event], *, every: int, seconds: float = 3.0) -> list[str]:
    """What is printed when every step takes `seconds`, and every other event one second."""
    clock, stream = Clock(), io.StringIO()
    view = PlainView(RunState(clock), stream, every=every)
    for event in events:
        clock.now += seconds if isinstance(event, StepFinished) else 1.0
        view.update(event)
    view.close()
    return stream.getvalue().splitlines()


def test_the_whole_of_a_small_run() -> None:
    assert lines(list(whole("runs/small")), every=3) == [
        "[ 0:01] starting ray",
        "[ 0:02] starting ranks",
        "qwen3 on plain, fake engine",
        "run directory: runs/small",
        "note: no reference policy",
        "   steps  reward held-out  exact     loss entropy    grad lp diff   tok/s  left",
        "     0/4            0.000  0.000",
        "     1/4   0.100                  -0.0100   2.000   0.500 1.0e-06  12,346  0:09",
        "     2/4            0.500  0.250",
        "     3/4   0.500                  -0.0300   1.500   0.500 3.0e-06  12,346  0:04",
        "     4/4   0.700                  -0.0400   1.250   0.500 4.0e-06  12,346  0:00",
        "     4/4            1.000  0.500",
        "checkpoint after 4 steps: runs/small/checkpoints/4",
        "",
        "finished after 4 of 4 steps, 1:15",
        "",
        "                           start       end",
        "reward                     0.100     0.700",
        "held-out reward            0.000     1.000",
        "held-out exact match       0.000     0.500",
        "loss                     -0.0100   -0.0400",
        "entropy                    2.000     1.250",
        "gradient norm              0.500     0.500",
        "log-prob difference      1.0e-06   4.0e-06",
        "response length              6.0       6.0",
        "truncated share            0.250     0.250",
        "tokens/s                  12,346    12,346",
        "",
        "prompt              expected             before          after          reward",
        r"35018>              01358           \x1b[31m9\n          01358  0.000 -> 1.000",
        "",
        "metrics  runs/small/metrics.jsonl",
        "export   runs/small/export",
    ]


def test_large_numbers_leave_a_space_between_columns() -> None:
    large = {"rollout/reward": -1234.5678, "train/loss": -1e7, "train/entropy": 1.5, "train/grad_norm": 12345.678}
    large |= {"perf/tokens_per_second": 1234567.0}
    row = lines([started("runs/small"), StepFinished(step=0, metrics=large)], every=1)[-1]
    assert row.split()[:-1] == ["1/4", "-1e+03", "-1.0e+07", "1.500", "1.2e+04", "1.2e+06"]


def test_slow_steps_have_a_line_at_least_every_twenty_seconds() -> None:
    def told(seconds: float) -> list[int]:
        ended = [StepFinished(step=step, metrics=metrics(0)) for step in range(12)]
        printed = lines([evolve(started("runs/slow"), steps=12), *ended], every=10, seconds=seconds)
        return [int(line.split("/")[0]) for line in printed if "/12 " in line]

    assert told(1.0) == [1, 10, 12]
    assert told(5.0) == [1, 5, 9, 10, 12]
    assert told(30.0) == list(range(1, 13))


def test_scores_of_sets_and_several_samples_are_told() -> None:
    told = {"eval/reward": 0.5, "eval/pass@1": 0.25, "eval/pass@2": 0.375, "eval/pass@8": 0.75, "eval/majority@8": 0.5}
    told |= {"eval/aime/reward": 0.125, "eval/aime/pass@1": 0.0625, "eval/aime/reward/style": 2.0}
    alone = {"eval/aime/reward": 0.25}
    events = [started("runs/small"), Evaluated(step=0, metrics=told), Evaluated(step=1, metrics=alone)]
    printed = lines([*events], every=1)
    scores = [line for line in printed if line.startswith("after ")]
    told_at_first = "held-out pass@1 0.250, held-out pass@8 0.750, held-out majority@8 0.500, aime reward 0.125"
    assert scores == [f"after 0 steps: {told_at_first}, aime pass@1 0.062", "after 1 step: aime reward 0.250"]
    assert len([line for line in printed if "/4 " in line]) == 1  # what was not scored has no row
    summary = [" ".join(line.split()) for line in finished(*events[1:])]
    for line in ("held-out pass@8 0.750 -", "aime reward 0.125 0.250", "aime pass@1 0.062 -"):
        assert line in summary
    assert not any("style" in line or "pass@2" in line for line in summary)


def test_a_long_phase_says_every_twenty_seconds_how_far() -> None:
    clock, stream = Clock(), io.StringIO()
    view = PlainView(RunState(clock), stream, every=1)

    def phase(name: str, seconds: int, *, step: int = 0, unit: str = "", of: int = 0) -> None:
        view.update(PhaseStarted(name=name, step=step))
        for second in range(1, seconds + 1):
            clock.now += 1.0
            done = min(second, of)
            view.update(PhaseProgress(name=name, step=step, seconds=second, unit=unit, done=done, of=of))

    phase("starting Ray", 45)
    phase("eval", 25, unit="answers sampled", of=50)
    phase("rollout", 41, unit="samples generated", of=64)
    phase("train", 19)
    view.update(StepFinished(step=0, metrics=metrics(0)))
    phase("train", 21, step=1)
    assert [line for line in stream.getvalue().splitlines() if line.startswith("[")] == [
        "[ 0:00] starting Ray",
        "[ 0:20] starting Ray for 20 s",
        "[ 0:40] starting Ray for 40 s",
        "[ 1:00] eval for 15 s: 15 of 50 answers sampled",
        "[ 1:20] step 0, rollout for 10 s: 10 of 64 samples generated",
        "[ 1:40] step 0, rollout for 30 s: 30 of 64 samples generated",
        "[ 2:00] step 0, train for 9 s",
        "[ 2:30] step 1, train for 20 s",
    ]


def test_a_resumed_run_says_so_and_prints_its_first_step() -> None:
    printed = lines([started("runs/small", first_step=1), *steps(1, 2)], every=100)
    assert printed[2] == "resumed after 1 of 4 steps"
    assert printed[-1].split()[:2] == ["2/4", "0.300"]
    assert printed[-1].split()[-1] == "0:06"  # two steps at three seconds, as time/step says


def test_an_evaluation_is_of_its_own_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.125}\n')
    events = [started(str(tmp_path), first_step=2, mode="eval"), evaluated(2)]
    end = RunFinished(reason="finished", steps_done=2, seconds=5.0)
    printed = lines([*events, end], every=100)
    assert printed[2] == "scoring the weights after 2 of 4 steps"
    assert printed[-2:] == ["held-out reward            0.500", "held-out exact match       0.250"]


def finished(*events: Event) -> list[str]:
    """What stands below the line that says how the run ended, of a run that ends after these events."""
    answers = shown("9", 0.0)
    end = RunFinished(reason="interrupted", steps_done=1, seconds=5.0, before=answers, after=answers)
    printed = lines([started("runs/small"), *events, end], every=100)
    return printed[printed.index("interrupted after 1 of 4 steps, 0:05") + 2 :]


def test_a_run_that_ended_after_its_first_step_says_so() -> None:
    """And of which step's weights its answers are."""
    first, second = (StepFinished(step=step, metrics=metrics(step)) for step in range(2))
    told = finished(evaluated(0), first)
    assert told[:3] == [f"{'first step':>32}", f"{'reward':27}0.100", f"{'held-out reward':27}0.000"]
    assert told[-2:] == [
        "prompt              expected          at step 0   reward",
        "35018>              01358                     9    0.000",
    ]
    assert finished(evaluated(0), first, second)[2] == f"{'held-out reward':27}0.000         -"  # heard once
    answers = finished(evaluated(0), first, evaluated(1))
    assert answers[-2] == "prompt              expected             answer   reward"
    answers = finished(first, second, evaluated(2), RunRewound(step=0), first)
    assert answers[-2] == "prompt              expected          at step 2   reward"


def test_what_was_waited_for_is_told_in_percent() -> None:
    """Of 16 s: a cause that is not in a step's metrics took no time in it, and what is below half a percent is left
    out."""
    first = {"time/step": 10.0, "idle/ranks/total": 4.0, "idle/ranks/samples": 3.2, "idle/ranks/driver": 0.8}
    second = {"time/step": 6.0, "idle/ranks/total": 4.0, "idle/ranks/samples": 3.96, "idle/ranks/rewards": 0.04}
    first |= {"idle/engines/total": 8.0, "idle/engines/training": 1.6, "idle/engines/longest": 6.4}
    told = finished(StepFinished(step=0, metrics=first), StepFinished(step=1, metrics=second))
    assert told[told.index("") + 1 : told.index("") + 3] == [
        "ranks waited for, % of time: samples 45, driver 5",
        "engines waited for, % of time: other engines 40, ranks 10",
    ]


def test_an_evaluation_has_no_steps() -> None:
    events = [started("runs/small", mode="eval"), PhaseStarted(name="eval", step=0), evaluated(0)]
    end = RunFinished(reason="finished", steps_done=0, seconds=5.0)
    assert lines([*events, end], every=100) == [
        "qwen3 on plain, fake engine",
        "run directory: runs/small",
        "scoring the initial weights",
        "",
        "finished after 0:05",
        "",
        "held-out reward            0.000",
        "held-out exact match       0.000",
    ]


def test_the_files_of_pictures_stand_below_their_prompts() -> None:
    names = ["3f9a001122334455", "00b1001122334455"]
    marks = "<picture 3f9a 1312x736><picture 00b1 32x32>"
    with_two = SampleShown(prompt=f"{marks}2+3?", response="5", answer="5", reward=1.0, pictures=names)
    answers = (with_two, *shown("9", 0.0))
    files = [f"  pictures/{name}.png" for name in names]
    end = RunFinished(reason="finished", steps_done=1, seconds=5.0, before=answers, after=answers)
    assert lines([started("runs/small"), end], every=1)[-5:] == [
        "prompt              expected             answer   reward",
        "2+3?                5                         5    1.000",
        *files,
        "35018>              01358                     9    0.000",
    ]
    worse = (evolve(with_two, response="7", reward=0.0), answers[1])
    assert lines([started("runs/small"), evolve(end, before=worse)], every=1)[-5:] == [
        "prompt              expected             before          after          reward",
        "2+3?                5                         7              5  0.000 -> 1.000",
        *files,
        "35018>              01358                     9              9  0.000 -> 0.000",
    ]


def test_the_end_of_a_chat_and_means_are_shown() -> None:
    chat = "system: Add.\nuser: 1+1?\nassistant: 2\nuser: 3+4?"
    answers = (SampleShown(prompt=chat, response="7", answer="7", reward=1.0),)
    many = [StepFinished(step=step, metrics={"rollout/reward": float(step % 2)}) for step in range(40)]
    end = RunFinished(reason="finished", steps_done=40, seconds=5.0, before=answers, after=answers)
    printed = lines([evolve(started("runs/small"), steps=40), *many, end], every=100)
    assert printed[-5:] == [
        "means of 10 steps          start       end",
        "reward                     0.500     0.500",
        "",
        "prompt              expected             answer   reward",
        "...: 2\\nuser: 3+4?  7                         7    1.000",
    ]
