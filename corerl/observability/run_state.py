"""The state of a run from its events, and its numbers as short texts, for the live display and the plain lines."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import frozen

from corerl.observability.history import PHASES, History
from corerl.pictures import REPR
from corerl.plugin.events import (
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


def number(value: float | None, metric: str = "") -> str:
    """A number in at most nine characters, with fixed decimals per metric so that columns line up; `-` for None."""
    if value is None:
        return "-"
    form = _FORMATS.get(metric, ".3f")
    if metric == TOKENS_PER_SECOND and round(value, 1) < 10:
        form = ".1f"  # of a large model on CPUs the whole number says little
    text = format(value, form)
    return text if len(text) <= 9 else f"{value:.1e}"


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
                    self.shown, self.shown_at = event.shown, f"sampled in step {self.done}"
            case Evaluated():
                self.scored = event.step
                self.history.add(event.step, event.metrics)
                if event.shown:
                    self.shown, self.shown_at = event.shown, f"held-out prompts after step {event.step}"
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
    def trained_since(self) -> bool:
        """Whether the latest evaluation is of earlier weights, as in a run that is stopped between two of them."""
        return self.scored is not None and self.scored < self.done

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
