from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from rich.console import Console

from corerl.pictures import Picture, save_pictures
from corerl.plugin import CheckpointSaved, PhaseProgress, PhaseStarted, SampleShown, StepFinished
from corerl_observe.live import LiveView, summary
from corerl_observe.run_state import RunState
from tests.observability.run import STEPS, Clock, evaluated, finished, metrics, started, steps


def terminal(width: int) -> Console:
    return Console(record=True, force_terminal=True, width=width, height=24, file=io.StringIO(), _environ={})


def screen(state: RunState, width: int = 100) -> list[str]:
    console = terminal(width)
    console.print(LiveView(state, console).render())
    return [line.rstrip() for line in console.export_text().splitlines()]


def middle() -> RunState:
    """After three of four steps."""
    state = RunState(clock := Clock())
    for event in [started("runs/small"), *steps(0, 3)]:
        clock.now += 2.0
        state.update(event)
    return state


def test_the_display_holds_the_numbers_of_the_newest_step() -> None:
    lines = screen(middle())
    text = "\n".join(lines)
    assert lines[0].split("  ")[0] == "qwen3 on plain, fake engine" and lines[0].endswith("runs/small")
    assert lines[1].startswith("3/4 steps ") and "left" in lines[1] and "rollout 2.0 s" in lines[1]
    assert lines[3].split() == ["reward", "0.500", "held-out", "reward", "0.500", "held-out", "exact", "0.250"]
    assert lines[4].split() == ["loss", "-0.0300", "entropy", "1.500", "grad", "norm", "0.500"]
    assert lines[5].split() == ["log-prob", "diff", "3.0e-06", "clipped", "-", "tokens/s", "12,346"]
    assert "rollout         1.000 █████" in text and "train           2.000 ██████████" in text
    assert "sampled in step 2" in lines
    assert lines[-1].split() == ["35018>", "01358", "01358", "1.000"]


@pytest.mark.parametrize("width", [80, 132])
def test_it_fits_a_terminal(width: int) -> None:
    state = middle()
    every_phase = {f"time/{name}": 1.0 for name in ("reward", "forward", "update_weights", "save")}
    long = [SampleShown(prompt="prompt\n" * 30, response="[bold]" * 30, answer="x" * 200, reward=0.0)] * 3
    state.update(StepFinished(step=3, metrics={**metrics(3), **every_phase}, shown=long))
    lines = screen(state, width)
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= width
    assert "[bold][bold]" in lines[-1]


@pytest.mark.parametrize("width", [1, 33, 41, 51, 52])
def test_without_room_for_a_plot_phases_stand_alone(width: int) -> None:
    text = "\n".join(screen(middle(), width))
    assert ("\u2800" in text) == (width >= 52)  # a plot is mostly empty
    assert ("train           2.000" in text) == (width >= 32)


def test_preparation_shows_what_is_done_and_how_long_it_took() -> None:
    clock = Clock()
    state = RunState(clock)
    state.update(PhaseStarted(name="starting ray", step=0))
    clock.now = 3.25
    state.update(PhaseStarted(name="loading model", step=0))
    clock.now = 4.25
    lines = screen(state)
    assert lines[1].endswith("loading model 1.0 s")
    assert lines[2:] == ["  done  starting ray  3.2 s"]


def test_the_display_counts_what_the_phase_counts() -> None:
    clock = Clock()
    state = RunState(clock)
    state.update(started("runs/small"))
    for name in ("rollout", "eval"):
        state.update(PhaseStarted(name=name, step=0))
        clock.now += 2.0
        state.update(PhaseProgress(name="rollout", step=0, seconds=2.0, unit="samples generated", done=37, of=512))
        assert screen(state)[1].endswith("rollout 2.0 s 37/512 generated" if name == "rollout" else "eval 2.0 s")


def test_the_summary_tells_start_end_answers_and_places() -> None:
    state = middle()
    state.update(evaluated(STEPS))
    console = terminal(80)
    console.print(summary(state, finished("runs/small"), width=80))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["finished", "after", "4", "of", "4", "steps,", "1:15"] in rows
    assert ["reward", "0.100", "0.500"] in rows
    assert ["held-out", "exact", "match", "0.000", "0.500"] in rows
    assert ["35018>", "01358", r"\x1b[31m9\n", "01358", "0.000", "->", "1.000"] in rows
    assert ["metrics", "runs/small/metrics.jsonl"] in rows


def test_the_summary_numbers_the_prompts_whose_pictures_it_draws(tmp_path: Path) -> None:
    picture = Picture(np.full((32, 32, 3), 7, np.uint8))
    save_pictures([picture], tmp_path)
    own = [picture.id[:16]]
    asked = SampleShown(prompt=f"{picture!r}how dark?", response="7", answer="7", reward=1.0, pictures=own)
    end = evolve(finished("runs/small"), before=[evolve(asked, response="8", reward=0.0)], after=[asked])
    state = RunState(Clock())
    state.update(started(str(tmp_path)))
    console = Console(record=True, force_terminal=True, color_system="truecolor", width=80, file=io.StringIO())
    for before, row in ((end.before, ["7", "8", "7", "0.000", "->", "1.000"]), (end.after, ["7", "7", "1.000"])):
        console.print(summary(state, evolve(end, before=before), width=80))
        lines = [line.split() for line in console.export_text().splitlines()]
        (caption,) = [at for at, words in enumerate(lines) if words == ["1", f"{picture.id[:16]}.png"]]
        assert lines[caption - 12 : caption] == [["\u2580" * 24]] * 12
        assert lines[caption + 3] == ["1", "how", "dark?", *row]


def test_the_display_ends_with_the_run_and_leaves_the_summary() -> None:
    state, console = RunState(Clock()), terminal(80)
    view = LiveView(state, console)
    for event in [started("runs/small"), *steps(0, STEPS), finished("runs/small")]:
        view.update(event)
    view.update(CheckpointSaved(step=STEPS, path="late"))  # does not bring the display back
    view.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden once and is back
    assert text.rstrip().endswith("runs/small/export")


def test_a_path_that_does_not_fit_has_a_line() -> None:
    state, console = RunState(Clock()), terminal(80)
    view = LiveView(state, console)
    long = f"/{'a directory of mine/' * 5}run"
    for event in [started(long), *steps(0, STEPS), finished(long)]:
        view.update(event)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[-4:] == ["metrics", f"{long}/metrics.jsonl", "export", f"{long}/export"]


@pytest.mark.parametrize("width", [80, 100])
def test_of_a_long_chat_the_end_is_shown(width: int) -> None:
    state = middle()
    chat = "".join(f"user: {n}+{n}?\nassistant: {2 * n}\n" for n in range(50)) + "user: \u6570\u5b66 3+4?"
    shown = [SampleShown(prompt=chat, response="7", answer="", reward=1.0)]
    state.update(StepFinished(step=3, metrics=metrics(3), shown=shown))
    (row,) = [line for line in screen(state, width) if "3+4?" in line]
    prompt, response, reward = row.split("  ")[0], *row.split()[-2:]
    assert prompt.startswith("\u2026") and prompt.endswith("user: \u6570\u5b66 3+4?")
    assert (response, reward) == ("7", "1.000")
