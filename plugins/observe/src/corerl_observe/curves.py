"""Draw the run's metrics to curves.png, including the earlier steps of a resumed run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from corerl.plugin import Evaluated, Event, RunFinished, RunRewound, RunStarted, StepFinished
from corerl_observe.run_state import History, phases, scores
from corerl_observe.specs import CurvesOptions

CURVES_FILE = "curves.png"
COLORS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285", "#e67700", "#5c677d")
INK, GRID = "#343a40", "#e9ecef"


class Curves:
    """Redraws every `options.every` steps and when the run ends, on matplotlib's Agg canvas: no display is needed."""

    def __init__(self, *, options: CurvesOptions, run_dir: str) -> None:
        self._options = options
        self._path = Path(run_dir) / CURVES_FILE
        self._history = History()
        self._title = ""
        self._stale = False  # whether there are numbers that the file does not show

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._title = event.title
                self._history = History.read(event.run_dir, before=event.repeats_from)
            case RunRewound():
                self._history.rewind(event.step)
            case StepFinished():
                self._history.add(event.step, event.metrics)
                self._stale = True
                if self._options.every and (event.step + 1) % self._options.every == 0:
                    self._write()
            case Evaluated():
                self._history.add(event.step, event.metrics)
                self._stale = True
            case RunFinished():
                self._write()

    def shutdown(self, reason: str) -> None:
        # A failed run may have steps that are not drawn yet.
        if self._stale:
            self._write()

    def _write(self) -> None:
        part = self._path.with_name(f".{self._path.name}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        draw(self._history, title=self._title).savefig(part, format="png")
        os.replace(part, self._path)
        self._stale = False


def draw(history: History, *, title: str) -> Figure:
    """Draw six panels over rollout steps. Thin lines are the measured values, thick lines their moving averages."""
    figure = Figure(figsize=(13, 7), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    # Fixed margins: matplotlib's layout engines draw everything twice.
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.07, top=0.9, wspace=0.24, hspace=0.22)
    figure.suptitle(title, x=0.05, ha="left", fontsize=13, fontweight="bold", color=INK)
    (rewards, losses, norms), (differences, lengths, times) = figure.subplots(2, 3)

    _panel(rewards, "reward")
    _line(rewards, history, "rollout/reward", "rollout reward", COLORS[0])
    _line(rewards, history, "eval/reward", "held-out reward", COLORS[2], thin=False)
    _line(rewards, history, "eval/exact_match", "held-out exact match", COLORS[1], thin=False)

    for color, (label, name) in zip(COLORS[3:], scores(history.names("eval/")).items(), strict=False):  # as many
        _line(rewards, history, name, label, color, thin=False)

    _panel(losses, "loss, entropy (right)")
    _line(losses, history, "train/loss", "loss", COLORS[0])
    # Entropy has its own scale: next to it every policy loss is a flat line.
    entropies = losses.twinx()
    _panel(entropies, "")
    entropies.grid(False)
    _line(entropies, history, "train/entropy", "entropy", COLORS[1])

    _panel(norms, "gradient norm before clipping")
    _line(norms, history, "train/grad_norm", "gradient norm", COLORS[3])

    _panel(differences, "log-prob difference, trainer and engine")
    _line(differences, history, "rollout/logprob_diff", "log-prob difference", COLORS[4])
    if any(value > 0 for value in history.series("rollout/logprob_diff")[1]):
        differences.set_yscale("log", nonpositive="mask")

    _panel(lengths, "response length, tokens")
    _line(lengths, history, "rollout/response_length", "response length", COLORS[5])

    _panel(times, "seconds of a step, by phase")
    _stack(times, history)

    losses.tick_params(axis="y", labelcolor=COLORS[0])
    entropies.tick_params(axis="y", labelcolor=COLORS[1])
    for axes, place, columns in ((rewards, "lower right", 1), (times, "upper left", 3)):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc=place, ncols=columns, fontsize=8, frameon=False, labelcolor=INK)
    for axes in (differences, lengths, times):
        axes.set_xlabel("rollout step", fontsize=9, color=INK)
    return figure


def _panel(axes: Axes, heading: str) -> None:
    axes.set_title(heading, loc="left", fontsize=10, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, length=0, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#adb5bd")


def _line(axes: Axes, history: History, name: str, label: str, color: str, *, thin: bool = True) -> None:
    """Draw one metric; if `thin`, for noisy values, as a faint line under its moving average."""
    steps, values = history.series(name)
    if not steps:
        return
    if steps != sorted(steps):  # later weights were scored first
        order = sorted(range(len(steps)), key=steps.__getitem__)
        steps, values = [steps[index] for index in order], [values[index] for index in order]
    if not thin:
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3, gid=name)
    axes.plot(steps, moving_average(values), color=color, linewidth=1.8, label=label)


def moving_average(values: Sequence[float]) -> NDArray[np.float64]:
    """[n] mean over a centered window of a tenth of the run, at most 21 values, so it does not lag.

    Values that are not finite are left out; the mean is NaN where none is left.
    """
    reach = min(10, len(values) // 20)
    known = np.isfinite(values)
    window = np.ones(2 * reach + 1)
    totals = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)]
    counts = np.convolve(known, window)[reach : reach + len(values)]
    means = np.full(len(values), np.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    return means


def _stack(axes: Axes, history: History) -> None:
    names = phases(history)
    columns = [dict(zip(*history.series(f"time/{name}"), strict=True)) for name in names]
    steps = sorted(set().union(*columns)) if columns else []
    if steps:
        rows = [[column.get(step, 0.0) for step in steps] for column in columns]
        colors = [COLORS[index % len(COLORS)] for index in range(len(names))]
        axes.stackplot(steps, rows, labels=names, colors=colors, alpha=0.75, linewidth=0)
        # Occasional phases, such as save, must not flatten all other steps.
        totals = sorted(sum(parts) for parts in zip(*rows, strict=True))
        axes.set_ylim(0, max(1.5 * totals[int(0.9 * (len(totals) - 1))], 1e-6))
        axes.margins(x=0)
