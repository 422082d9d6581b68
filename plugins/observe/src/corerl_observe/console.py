"""Show the run's progress on the terminal or in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from corerl.messages import printable, shorten, shorten_to_end
from corerl.pictures import PICTURES
from corerl.plugin import (
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    PhaseProgress,
    PhaseStarted,
    RunFinished,
    RunStarted,
    SampleShown,
    StepFinished,
)
from corerl_observe.run_state import (
    PHASES,
    RunState,
    after_steps,
    duration,
    number,
    prompt_text,
    rough_duration,
    scores,
)
from corerl_observe.specs import ConsoleOptions

if TYPE_CHECKING:
    from corerl_observe.live import LiveView


class Console:
    """The live display, if standard output is a terminal that can show it, else plain lines."""

    def __init__(self, *, options: ConsoleOptions, run_dir: str) -> None:
        self._view: LiveView | PlainView = PlainView(RunState(time.monotonic), sys.stdout, every=options.every)
        if sys.stdout.isatty():
            from corerl_observe.live import live_view  # with it rich, which a log needs not

            self._view = live_view() or self._view

    def observe(self, event: Event) -> None:
        self._view.update(event)

    def shutdown(self, reason: str) -> None:
        self._view.close()


# heading, metric, width; 79 characters including the first and the last column
COLUMNS = (
    ("reward", "rollout/reward", 8),
    ("held-out", "eval/reward", 9),
    ("exact", "eval/exact_match", 7),
    ("loss", "train/loss", 9),
    ("entropy", "train/entropy", 8),
    ("grad", "train/grad_norm", 8),
    ("lp diff", "rollout/logprob_diff", 8),
    ("tok/s", "perf/tokens_per_second", 8),
)


QUIET_SECONDS = 20.0  # with slow steps, no longer pause between lines


class PlainView:
    """Prints a line every `every` steps, or for a step that ends `QUIET_SECONDS` after the last line, at the first and
    the last step, and at each evaluation; and where the run is, if no line has been printed for that long."""

    def __init__(self, state: RunState, stream: TextIO, *, every: int) -> None:
        self._state = state
        self._stream = stream
        self._every = every
        self._headed = False
        self._row_at = self._said_at = state.clock()  # times of the last row and the last line

    def update(self, event: Event) -> None:
        state = self._state
        state.update(event)
        match event:
            case RunStarted():
                self._say(event.title)
                self._say(f"run directory: {event.run_dir}")
                if state.scores and not event.first_step:
                    self._say("scoring the initial weights")
                elif event.first_step:
                    what = "scoring the weights" if state.scores else "resumed"
                    self._say(f"{what} after {event.first_step} of {event.steps} steps")
            case PhaseStarted() if state.preparing:
                self._say(f"[{duration(state.clock() - state.began):>5}] {event.name}")
            case PhaseProgress() if state.clock() - self._said_at >= QUIET_SECONDS:
                self._say(f"[{duration(state.clock() - state.began):>5}] {_far(event)}")
            case StepFinished():
                first, last = state.done == state.first_step + 1, state.done == state.steps
                quiet = state.clock() - self._row_at >= QUIET_SECONDS
                if first or last or quiet or state.done % self._every == 0:
                    left = state.seconds_left()
                    self._row(state.done, event.metrics, "" if left is None else rough_duration(left))
            case Evaluated() if not state.scores:  # else the summary says the same
                if "eval/reward" in event.metrics:
                    self._row(event.step, event.metrics, "")
                if scored := scores(list(event.metrics)):
                    numbers = (f"{label} {number(event.metrics[name], name)}" for label, name in scored.items())
                    self._say(f"{after_steps(event.step)}: {', '.join(numbers)}")
            case CheckpointSaved():
                self._say(f"checkpoint {after_steps(event.step)}: {event.path}")
            case Notice():
                self._say(f"note: {event.text}")
            case RunFinished():
                for line in summary(state, event):
                    self._say(line)

    def close(self) -> None:
        """Nothing to close."""

    def _row(self, step: int, metrics: Mapping[str, float], left: str) -> None:
        self._row_at = self._state.clock()
        total = self._state.steps
        wide = max(8, 2 * len(str(total)) + 1)
        if not self._headed:
            heading = "".join(f"{name:>{width}}" for name, _, width in COLUMNS)
            self._say(f"{'steps':>{wide}}{heading}{'left':>6}")
            self._headed = True
        cells = "".join(
            f"{number(metrics[metric], metric, width - 1) if metric in metrics else '':>{width}}"
            for _, metric, width in COLUMNS
        )
        self._say(f"{f'{step}/{total}':>{wide}}{cells}{left:>6}")

    def _say(self, line: str) -> None:
        self._said_at = self._state.clock()
        # One sampled character must not end a run that logs in ASCII.
        encoding = self._stream.encoding or "utf-8"
        safe = printable(line.rstrip()).encode(encoding, "backslashreplace").decode(encoding)
        print(safe, file=self._stream, flush=True)


def _far(event: PhaseProgress) -> str:
    """How far a phase is, such as 'step 3, rollout for 41 s: 37 of 512 samples'."""
    step = f"step {event.step}, " if event.name in PHASES and event.name != "eval" else ""
    count = f": {event.done} of {event.of} {event.unit}" if event.unit else ""
    return f"{step}{event.name} for {event.seconds:.0f} s{count}"


def summary(state: RunState, event: RunFinished) -> Iterator[str]:
    """How metrics began and ended, the same prompts before and after training, and the paths of all outputs."""
    yield ""
    yield state.outcome(event)
    headings, ends = state.history.ends(state.numbers.values())
    if ends:
        yield ""
        if any(headings):
            yield f"{headings[0]:22}" + "".join(f"{heading:>10}" for heading in headings[1:])
        for label, metric in state.numbers.items():
            if metric in ends:
                yield f"{shorten(label, 21):22}" + "".join(f"{number(value, metric):>10}" for value in ends[metric])
    if waits := list(state.waits()):
        yield ""
        yield from waits
    if event.before and event.before == event.after:
        heading = f"at step {state.scored}" if state.scored_other_weights else "answer"
        yield ""
        yield f"{'prompt':18}  {'expected':12}  {heading:>13}  {'reward':>7}"
        for answer in event.after:
            yield (
                f"{shorten_to_end(prompt_text(answer), 18):18}  {shorten(answer.answer, 12):12}"
                f"  {shorten(answer.response, 13):>13}  {number(answer.reward):>7}"
            )
            yield from _files(answer)
    elif event.before and event.after:
        yield ""
        yield f"{'prompt':18}  {'expected':12}  {'before':>13}  {'after':>13}  {'reward':>14}"
        for before, after in zip(event.before, event.after, strict=True):
            change = f"{number(before.reward)} -> {number(after.reward)}"
            yield (
                f"{shorten_to_end(prompt_text(before), 18):18}  {shorten(before.answer, 12):12}"
                f"  {shorten(before.response, 13):>13}  {shorten(after.response, 13):>13}  {change:>14}"
            )
            yield from _files(before)
    if event.artifacts:
        yield ""
        width = max(len(what) for what in event.artifacts)
        for what, path in event.artifacts.items():
            yield f"{what:{width}}  {path}"


def _files(answer: SampleShown) -> Iterator[str]:
    """Where the pictures of its prompt are in the run's directory."""
    yield from (f"  {PICTURES}/{name}.png" for name in answer.pictures)
