"""A run's metrics by name, from events or from metrics.jsonl, so that a resumed run knows its earlier steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from corerl.observability.jsonl import METRICS_FILE, read_lines

FEW = 10  # steps at either end of a run, at most, that a summary averages over


class History:
    """The steps and values recorded for each metric, in the order of arrival."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}

    @classmethod
    def read(cls, run_dir: str, *, before: float) -> History:
        """Read the steps smaller than `before` of the run in `run_dir`; null becomes NaN."""
        history = cls()
        if before <= 0:
            return history  # without reading the file, which may be damaged
        for _, record in read_lines(Path(run_dir) / METRICS_FILE, before=before):
            step = record.pop("step")
            history.add(step, {name: math.nan if value is None else value for name, value in record.items()})
        return history

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._points.setdefault(name, []).append((step, float(value)))

    def rewind(self, step: int) -> None:
        """Forget what was recorded of the steps from this one on."""
        kept = {name: [point for point in points if point[0] < step] for name, points in self._points.items()}
        self._points = {name: points for name, points in kept.items() if points}

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self._points if name.startswith(prefix)]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric; both empty if it was never recorded."""
        points = self._points.get(name, [])
        return [step for step, _ in points], [value for _, value in points]

    def last(self, name: str) -> float | None:
        return self._points[name][-1][1] if name in self._points else None

    def sum(self, name: str) -> float:
        """Of all values that are numbers; 0.0 if the metric was never recorded."""
        return math.fsum(value for value in self.series(name)[1] if not math.isnan(value))

    def ends(self, names: Iterable[str]) -> tuple[list[str], dict[str, list[float | None]]]:
        """The headings of a summary, that of the names included, and how each recorded metric in `names` began and
        ended: its mean over the first and over the last steps, a quarter of all at most, since single steps are noisy.
        Of evaluations, which are not, the first and the last.

        The end is None if there is only one value; if that is true of all metrics, its column is left out. What
        is left is then of the first step, if there was one.
        """
        recorded = {name: self.series(name)[1] for name in names if name in self._points}
        longest = max(map(len, recorded.values()), default=0)
        if longest <= 1:
            stepped = any(not _evaluated(name) for name in recorded)
            return ["", "first step" if stepped else ""], {name: [values[0]] for name, values in recorded.items()}
        steps = max(map(len, (values for name, values in recorded.items() if not _evaluated(name))), default=0)
        few = max(1, min(FEW, steps // 4))
        ends: dict[str, list[float | None]] = {}
        for name, values in recorded.items():
            size = 1 if _evaluated(name) else max(1, min(few, len(values) // 2))
            ends[name] = [_mean(values[:size]), _mean(values[-size:]) if len(values) > 1 else None]
        return [f"means of {few} steps" if few > 1 else "", "start", "end"], ends

    def recent(self, name: str, steps: int) -> float:
        """The average of a metric per step, over the last `steps` steps that ended. `time/step` says which ended, and
        only those that this history knows count."""
        ended, _ = self.series("time/step")
        if not ended:
            return 0.0
        first = max(ended[0], ended[-1] - steps + 1)
        pairs = zip(*self.series(name), strict=True)
        return sum(value for step, value in pairs if first <= step <= ended[-1]) / (ended[-1] - first + 1)


def _evaluated(name: str) -> bool:
    return name.startswith("eval/")


def _mean(values: Sequence[float]) -> float:
    """The mean of those that are numbers; NaN if none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


# Phases of a step in the order in which they happen; other phases come after them.
PHASES = ("rollout", "reward", "compare", "forward", "train", "update_weights", "eval", "save")


def phases(history: History) -> list[str]:
    """Names of the timed phases, in order. `time/step` is the whole step, not a phase."""
    timed = [name.removeprefix("time/") for name in history.names("time/") if name != "time/step"]
    return sorted(timed, key=lambda name: (PHASES.index(name) if name in PHASES else len(PHASES), name))
