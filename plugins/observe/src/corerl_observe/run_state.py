"""The state of a run and its metrics by name, from its events or from metrics.jsonl, and its numbers as short texts,
for the live display and the plain lines."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from attrs import frozen

from corerl.observability import METRICS_FILE, read_lines
from corerl.pictures import REPR
from corerl.plugin import (
    Evaluated,
    Event,
    PhaseProgress,
    PhaseStarted,
    RunFinished,
    RunRewound,
    RunStarted,
    SampleShown,
    StepFinished,
)

TOKENS_PER_SECOND = "perf/tokens_per_second"
# Formats of metrics; all others have three decimals.
_FORMATS = {
    "train/loss": ".4f",
    "rollout/logprob_diff": ".1e",
    "rollout/response_length": ".1f",
    TOKENS_PER_SECOND: ",.0f",
}


def number(value: float | None, metric: str = "", width: int = 9) -> str:
    """A number in at most `width` characters, with fixed decimals per metric so that columns line up, or with few
    digits where these do not fit; `-` for None."""
    if value is None:
        return "-"
    form = _FORMATS.get(metric, ".3f")
    if metric == TOKENS_PER_SECOND and round(value, 1) < 10:
        form = ".1f"  # of a large model on CPUs the whole number says little
    for each in (form, ".1e", ".0e"):
        text = format(value, each)
        if len(text) <= width:
            break
    return text


def prompt_text(answer: SampleShown) -> str:
    """The prompt without the marks of its pictures."""
    return REPR.sub("", answer.prompt) if answer.pictures else answer.prompt


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 3:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rough_duration(seconds: float) -> str:
    """Seconds as 0:07 or 12:34, from an hour on as 3h05: at most five characters below a hundred hours."""
    if round(seconds) < 3600:
        return duration(seconds)
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02}"


# label -> metric, in the order of the tables at the end
NUMBERS: Mapping[str, str] = {
    "reward": "rollout/reward",
    "held-out reward": "eval/reward",
    "held-out exact match": "eval/exact_match",
    "loss": "train/loss",
    "entropy": "train/entropy",
    "gradient norm": "train/grad_norm",
    "log-prob difference": "rollout/logprob_diff",
    "response length": "rollout/response_length",
    "truncated share": "rollout/truncated",
    "tokens/s": "perf/tokens_per_second",
    "ranks idle, s/step": "idle/ranks/total",
    "engines idle, s/step": "idle/engines/total",
}


def scores(names: Sequence[str]) -> dict[str, str]:
    """Label -> metric of what evaluations have reported besides `NUMBERS`: rewards of sources and sets, and pass@k and
    majority@k of all, for 1 and the most samples."""
    most: dict[str, int] = {}
    found = [name for name in names if re.fullmatch(r"eval/(.+/)?(reward|(pass|majority)@\d+)", name)]
    for kind, _, count in (name.partition("@") for name in found):
        most[kind] = max(most.get(kind, 0), int(count or 0))
    kept = [name for name in found if int(name.partition("@")[2] or 0) in (1, most[name.partition("@")[0]])]
    labels = {name: name.removeprefix("eval/").replace("/", " ") for name in kept if name not in NUMBERS.values()}
    return {label if " " in label else f"held-out {label}": name for name, label in labels.items()}


# who -> what it waited for, in the words of the summary -> the last part of the metric
WAITS: Mapping[str, Mapping[str, str]] = {
    "ranks": {"samples": "samples", "rewards": "rewards", "driver": "driver"},
    "engines": {"other engines": "longest", "rewards": "rewards", "ranks": "training", "driver": "driver"},
}


@frozen
class Phase:
    name: str
    began: float  # on the run's clock


class RunState:
    """Takes every event, in any order that a driver may send them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = clock()
        self.title = ""
        self.scores = False  # whether it only scores held-out prompts, and has no steps
        self.run_dir = ""
        self.steps = 0  # rollout steps in all
        self.first_step = 0  # the step at which this process began
        self.done = 0  # rollout steps finished, those before a resume included
        self.history = History()
        self.scored: int | None = None  # rollout steps that were done at the latest evaluation
        self.shown: Sequence[SampleShown] = ()
        self.shown_at = ""  # what those answers are, and of which step
        self.phase: Phase | None = None
        self.progress: PhaseProgress | None = None  # of that phase, if it counts something
        self.preparing = True  # until the first phase of a step
        self.prepared: list[tuple[str, float]] = []  # phases before the first step, and their seconds
        self._finishes: deque[float] = deque(maxlen=21)  # end times of the latest steps

    def update(self, event: Event) -> None:
        now = self.clock()
        match event:
            case RunStarted():
                self.title, self.run_dir = event.title, event.run_dir
                self.steps, self.first_step, self.done = event.steps, event.first_step, event.first_step
                self.scores = event.mode == "eval"  # then the summary is of these scores only, not of earlier ones
                self.history = History() if self.scores else History.read(event.run_dir, before=event.repeats_from)
            case RunRewound():
                self.done = event.step
                self.history.rewind(event.step)
                self._finishes.clear()
            case PhaseStarted():
                if self.phase is not None and self.preparing:
                    self.prepared.append((self.phase.name, now - self.phase.began))
                self.preparing = self.preparing and event.name not in PHASES
                self.phase, self.progress = Phase(event.name, now), None
            case PhaseProgress():
                if self.phase is not None and self.phase.name == event.name and event.unit:
                    self.progress = event
            case StepFinished():
                self.preparing = False
                self.done = event.step + 1
                self.history.add(event.step, event.metrics)
                self._finishes.append(now)
                if event.shown:
                    self.shown, self.shown_at = event.shown, f"sampled in step {event.step}"
            case Evaluated():
                self.scored = event.step
                self.history.add(event.step, event.metrics)
                if event.shown:
                    self.shown, self.shown_at = event.shown, f"held-out prompts {after_steps(event.step)}"
            case RunFinished():
                self.phase = self.progress = None

    def outcome(self, event: RunFinished) -> str:
        """How the run ended, and after how long."""
        steps = "" if self.scores else f"{event.steps_done} of {self.steps} steps, "
        return f"{event.reason} after {steps}{duration(event.seconds)}"

    @property
    def numbers(self) -> dict[str, str]:
        """Label -> metric of the summary."""
        return {**NUMBERS, **scores(self.history.names("eval/"))}

    @property
    def scored_other_weights(self) -> bool:
        """Whether the latest evaluation is of other weights, as in a run that is stopped between two of them, or before
        it has taken steps again that were lost."""
        return self.scored is not None and self.scored != self.done

    def waits(self) -> Iterator[str]:
        """What ranks and engines waited for in all steps, the longest first."""
        whole = self.history.sum("time/step")
        for who, causes in WAITS.items():
            seconds = {words: self.history.sum(f"idle/{who}/{cause}") for words, cause in causes.items()}
            shares = {words: round(100 * each / whole) for words, each in seconds.items()} if whole else {}
            longest = sorted(shares.items(), key=lambda share: -share[1])
            if waits := ", ".join(f"{words} {share}" for words, share in longest if share):
                yield f"{who} waited for, % of time: {waits}"

    def seconds_left(self) -> float | None:
        """Seconds left at the latest steps' pace, evaluations and saves included; None before the first step."""
        if len(self._finishes) > 1:
            pace = (self._finishes[-1] - self._finishes[0]) / (len(self._finishes) - 1)
        elif self._finishes:
            pace = self.history.last("time/step") or self._finishes[0] - self.began
        else:
            return None
        return pace * (self.steps - self.done)


def after_steps(steps: int) -> str:
    return f"after {steps} step{'s' * (steps != 1)}"


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
        for record in read_lines(Path(run_dir) / METRICS_FILE, before=before):
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

        Of a metric with only one value the end is None, or the start if the value came after the first step; if all
        have only one, the column of ends is left out. What is left is then of the first step, if there was one.
        """
        recorded = {name: self.series(name)[1] for name in names if name in self._points}
        longest = max(map(len, recorded.values()), default=0)
        if longest <= 1:
            stepped = any(not _evaluated(name) for name in recorded)
            return ["", "first step" if stepped else ""], {name: [values[0]] for name, values in recorded.items()}
        steps = max(map(len, (values for name, values in recorded.items() if not _evaluated(name))), default=0)
        few = max(1, min(FEW, steps // 4))
        ends: dict[str, list[float | None]] = {}
        first = min(self._points[name][0][0] for name in recorded)
        for name, values in recorded.items():
            size = 1 if _evaluated(name) else max(1, min(few, len(values) // 2))
            if len(values) > 1:
                ends[name] = [_mean(values[:size]), _mean(values[-size:])]
            else:
                ends[name] = [values[0], None] if self._points[name][0][0] == first else [None, values[0]]
        return [f"means of {few} steps" if few > 1 else "", "start", "end"], ends

    def recent(self, name: str, steps: int) -> float:
        """The average of a metric per step, over the last `steps` steps that ended. `time/step` says which ended, and
        only those that this history knows count."""
        ended = self._points.get("time/step")
        if not ended:
            return 0.0
        last = ended[-1][0]
        first = max(ended[0][0], last - steps + 1)
        # From the newest back: a display asks several times a second, also after many steps.
        newest = takewhile(lambda point: point[0] >= first, reversed(self._points.get(name, [])))
        return sum(value for step, value in newest if step <= last) / (last - first + 1)


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
