"""A run's metrics by name, from events or from metrics.jsonl, so that a resumed run knows its earlier steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from corerl.observability.files import read_lines

METRICS_FILE = "metrics.jsonl"


class History:
    """The steps and values recorded for each metric, in the order of arrival."""

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}

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
            self._steps.setdefault(name, []).append(step)
            self._values.setdefault(name, []).append(float(value))

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self._steps if name.startswith(prefix)]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric; both empty if it was never recorded."""
        return self._steps.get(name, []), self._values.get(name, [])

    def first(self, name: str) -> float | None:
        values = self._values.get(name)
        return values[0] if values else None

    def last(self, name: str) -> float | None:
        values = self._values.get(name)
        return values[-1] if values else None

    def ends(self, names: Iterable[str]) -> tuple[list[str], dict[str, list[float | None]]]:
        """The headings of a summary, and the first and last value of each recorded metric in `names`.

        The last value is None if there is only one; if that is true of all metrics, its column is left out.
        """
        heard = {name: self._values[name] for name in names if name in self._values}
        if all(len(values) == 1 for values in heard.values()):
            return [""], {name: [values[0]] for name, values in heard.items()}
        return ["start", "end"], {
            name: [values[0], values[-1] if len(values) > 1 else None] for name, values in heard.items()
        }

    def recent(self, name: str, steps: int) -> float:
        """The average of a metric per step, over the last `steps` steps that ended. `time/step` tells which ended, and
        only those that this history knows count."""
        ended, _ = self.series("time/step")
        if not ended:
            return 0.0
        first = max(ended[0], ended[-1] - steps + 1)
        pairs = zip(*self.series(name), strict=True)
        return sum(value for step, value in pairs if first <= step <= ended[-1]) / (ended[-1] - first + 1)


# Phases of a step in the order in which they happen; other phases come after them.
PHASES = ("rollout", "reward", "forward", "train", "update_weights", "eval", "save")


def phases(history: History) -> list[str]:
    """Names of the timed phases, in order. `time/step` is the whole step, not a phase."""
    timed = [name.removeprefix("time/") for name in history.names("time/") if name != "time/step"]
    return sorted(timed, key=lambda name: (PHASES.index(name) if name in PHASES else len(PHASES), name))
