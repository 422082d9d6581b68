from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from corerl.plugin import Evaluated, Event, StepFinished
from corerl_observe.curves import Curves, draw, moving_average
from corerl_observe.run_state import History
from corerl_observe.specs import CurvesOptions
from tests.observability.run import evaluated, metrics, started, steps, whole

PNG = b"\x89PNG\r\n\x1a\n"


def extension(run_dir: Path, *, every: int = 0) -> Curves:
    return Curves(options=CurvesOptions(every=every), run_dir=str(run_dir))


def observed(run_dir: Path, *events: Event, ends: str = "finished") -> bytes:
    """The picture of a run of these events."""
    curves = extension(run_dir)
    for event in events:
        curves.observe(event)
    curves.shutdown(ends)
    return (run_dir / "curves.png").read_bytes()


def record(run_dir: Path, *events: Event) -> None:
    """Append to metrics.jsonl what an earlier run has left there."""
    run_dir.mkdir(exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as file:
        for event in events:
            if isinstance(event, StepFinished | Evaluated):
                file.write(json.dumps({"step": event.step, **event.metrics}) + "\n")


def panel(figure: Figure, heading: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == heading)


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    found = next(line for line in axes.lines if label in (line.get_label(), line.get_gid()))
    return list(found.get_xdata()), list(found.get_ydata())


def test_the_lines_are_the_metrics(tmp_path: Path) -> None:
    history = History()
    for event in steps(0, 4):
        if hasattr(event, "metrics"):
            history.add(event.step, event.metrics)
    figure = draw(history, title="a run")
    rewards = panel(figure, "reward")
    assert line(rewards, "rollout/reward") == ([0, 1, 2, 3], [metrics(s)["rollout/reward"] for s in range(4)])
    assert line(rewards, "held-out exact match") == ([0, 2], [0.0, 0.25])
    differences = panel(figure, "log-prob difference, trainer and engine")
    assert differences.get_yscale() == "log"
    assert line(differences, "rollout/logprob_diff")[1] == [metrics(s)["rollout/logprob_diff"] for s in range(4)]
    # rollout takes 1 s and train 2 s of every step: the second area lies between 1 and 3.
    times = panel(figure, "seconds of a step, by phase")
    assert [text.get_text() for text in times.get_legend().get_texts()] == ["rollout", "train"]
    train = times.collections[1].get_paths()[0].vertices
    assert (train[:, 1].min(), train[:, 1].max()) == (1.0, 3.0)


def test_it_is_drawn_every_few_steps_and_at_the_end(tmp_path: Path) -> None:
    curves, path = extension(tmp_path, every=2), tmp_path / "curves.png"
    drawn = []
    for event in whole(str(tmp_path)):
        curves.observe(event)
        if path.exists():
            assert path.read_bytes().startswith(PNG)
            drawn.append(type(event).__name__)
            path.unlink()
    assert drawn == ["StepFinished", "StepFinished", "RunFinished"]
    curves.shutdown("finished")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_is_still_drawn(tmp_path: Path) -> None:
    assert observed(tmp_path, started(str(tmp_path)), *steps(0, 1), ends="failed").startswith(PNG)


def test_a_resumed_run_draws_the_same_picture(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir()
    record(broken, *steps(0, 3))
    resumed = observed(broken, started(str(broken), first_step=2), *steps(2, 4))
    assert resumed == observed(straight, started(str(straight)), *steps(0, 4))


def test_scores_of_several_weights_are_one_line(tmp_path: Path) -> None:
    drawn = []
    for step in (4, 2):
        curves = extension(tmp_path)
        for event in (started(str(tmp_path), first_step=step, mode="eval"), evaluated(step)):
            curves.observe(event)
        record(tmp_path, evaluated(step))
        drawn = line(panel(draw(curves._history, title=""), "reward"), "held-out exact match")
    assert drawn == ([2, 4], [0.25, 0.5])


def test_the_moving_average_is_centred_over_finite_values() -> None:
    values = [float(step) for step in range(60)]  # 60 steps: three neighbors on each side
    values[30] = math.nan
    expected = [np.nanmean(values[max(0, i - 3) : i + 4]) for i in range(60)]
    assert moving_average(values) == pytest.approx(expected)
    assert np.isnan(moving_average([math.nan])).all()
