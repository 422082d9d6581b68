"""A live display of the run on a terminal of 80 columns or more, and a summary at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

from attrs import frozen
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from corerl.messages import printable
from corerl.plugin import Event, Notice, RunFinished, SampleShown
from corerl_observe.braille import Line, draw
from corerl_observe.pictures import Pictures
from corerl_observe.run_state import RunState, after_steps, duration, number, phases, prompt_text

REWARD, EXACT = "cyan", "magenta"

# label, metric, style; shown in rows of three
PANEL = (
    ("reward", "rollout/reward", REWARD),
    ("held-out reward", "eval/reward", ""),
    ("held-out exact", "eval/exact_match", EXACT),
    ("loss", "train/loss", ""),
    ("entropy", "train/entropy", ""),
    ("grad norm", "train/grad_norm", ""),
    ("log-prob diff", "rollout/logprob_diff", ""),
    ("clipped", "train/clip_fraction", ""),
    ("tokens/s", "perf/tokens_per_second", ""),
)
PLOT_HEIGHT = 6
NARROWEST = 20  # minimum columns for a plot and its scale
RECENT = 20  # steps that the phases' bars are averaged over


def live_view(terminal: Console | None = None) -> LiveView | None:
    """The display of a run on standard output; None if that is no terminal that can show one."""
    terminal = terminal or Console()
    able = terminal.is_terminal and not terminal.is_dumb_terminal and terminal.encoding.startswith("utf")
    # FORCE_COLOR makes rich take a pipe for a terminal, but cursor movements are useless in a file.
    return LiveView(RunState(time.monotonic), terminal) if able and terminal.file.isatty() else None


class LiveView:
    """A display that rich's own thread redraws four times a second; a lock guards everything it reads."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console
        self._lock = Lock()
        self._closed = False
        self._spinner = Spinner("dots", style="green")
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def update(self, event: Event) -> None:
        with self._lock:
            self._state.update(event)
        match event:
            case RunFinished():
                self.close()
                # Uncropped, so that paths and commands can be copied: the terminal wraps long ones, and knows it.
                self._console.print(summary(self._state, event, width=self._console.width), crop=False)
            case Notice():
                self._console.print(Text(f"note: {printable(event.text)}", style="yellow"))
            case _ if not self._closed:
                self._live.start()

    def close(self) -> None:
        self._closed = True
        self._live.stop()

    def render(self) -> RenderableType:
        """The current display: 22 lines, so that it fits a terminal of 24."""
        with self._lock:
            state = self._state
            parts: list[RenderableType] = [_header(state), self._progress()]
            if state.preparing or state.scores:
                parts += [Text(f"  done  {name}  {seconds:.1f} s", style="dim") for name, seconds in state.prepared]
                return Group(*parts)
            width = self._console.width
            parts += [Text(), _numbers(state), Text(), _pictures(state, width)]
            if state.shown:
                parts += [Text(), _answers(state.shown[:3], state.shown_at)]
            return Group(*parts)

    def _progress(self) -> RenderableType:
        state = self._state
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, min_width=24)
        left = state.seconds_left()
        if state.phase is not None:
            text = f"{state.phase.name} {state.clock() - state.phase.began:.1f} s"
            if (progress := state.progress) is not None:  # in a word: there is one line for all
                text += f" {progress.done}/{progress.of} {progress.unit.rpartition(' ')[2]}"
            self._spinner.update(text=Text(text))
        spinner = self._spinner if state.phase is not None else ""
        if state.scores:
            row.add_row("scoring held-out prompts", "", "", spinner)
            return row
        row.add_row(
            f"{state.done}/{state.steps} steps",
            ProgressBar(total=max(state.steps, 1), completed=state.done),
            "" if left is None else f"{duration(left)} left",
            spinner,
        )
        return row


def _header(state: RunState) -> RenderableType:
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(no_wrap=True, overflow="ellipsis", ratio=2)
    row.add_column(no_wrap=True, overflow="ellipsis", justify="right", ratio=1)
    row.add_row(Text(printable(state.title), style="bold"), Text(printable(state.run_dir), style="dim"))
    return row


def _numbers(state: RunState) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True, ratio=3)
        table.add_column(no_wrap=True, ratio=2, justify="right", min_width=9)
    for start in range(0, len(PANEL), 3):
        cells: list[RenderableType] = []
        for label, metric, style in PANEL[start : start + 3]:
            cells += [Text(label, style="dim"), Text(number(state.history.last(metric), metric), style=f"bold {style}")]
        table.add_row(*cells)
    return table


def _pictures(state: RunState, width: int) -> RenderableType:
    """The plot on the left, the seconds of each phase on the right; only the latter if there is no room for both."""
    side = 32
    if width < side + NARROWEST:
        return _phases(state, side)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=width - side - 1)
    grid.add_column(width=side)
    grid.add_row(_plot(state, width - side - 1), _phases(state, side))
    return grid


def _plot(state: RunState, width: int) -> RenderableType:
    lines = [
        Line(*state.history.series("rollout/reward"), REWARD),
        Line(*state.history.series("eval/exact_match"), EXACT),
    ]
    plot = draw(lines, width=width - 8, height=PLOT_HEIGHT)
    text = Text(no_wrap=True)
    text.append("reward", style=REWARD).append(" and ").append("held-out exact match", style=EXACT)
    for index, row in enumerate(plot.rows):
        mark = plot.high if index == 0 else plot.low if index == PLOT_HEIGHT - 1 else None
        text.append(f"\n{'' if mark is None else f'{mark:.2f}':>6} ", style="dim")
        for character, style in row:
            text.append(character, style=style)
    return text


def _phases(state: RunState, width: int) -> RenderableType:
    seconds = {name: state.history.recent(f"time/{name}", RECENT) for name in phases(state.history)}
    longest = max(seconds.values(), default=0.0)
    text = Text(f"seconds a step, last {RECENT}", no_wrap=True)
    for name, value in seconds.items():
        bar = round((width - 22) * value / longest) if longest else 0
        text.append(f"\n{name[:14]:14} ", style="dim").append(f"{value:6.3f} ")
        text.append("\u2588" * bar, style="blue")
    return text


def _answers(shown: Sequence[SampleShown], title: str, *, numbered: bool = False) -> RenderableType:
    table = _table("prompt", "response", "expected", title=title)
    table.add_column("reward", justify="right", no_wrap=True)
    for index, answer in enumerate(shown, start=1):
        prompt = _prompt(answer, index if numbered else 0)
        table.add_row(prompt, _cell(answer.response), _cell(answer.answer), number(answer.reward))
    return table


def summary(state: RunState, event: RunFinished, *, width: int) -> RenderableType:
    """How metrics began and ended, the same prompts before and after training, and the paths of all outputs. A path
    that does not fit into `width` columns after its name goes below it, unbroken."""
    color = "green" if event.reason == "finished" else "red"
    parts: list[RenderableType] = [Text(), Text(state.outcome(event), style=f"bold {color}"), Text()]
    values = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    headings, ends = state.history.ends(state.numbers.values())
    for index, heading in enumerate(headings):
        values.add_column(heading, justify="right" if index else "left")
    for label, metric in state.numbers.items():
        if metric in ends:
            values.add_row(label, *(number(value, metric) for value in ends[metric]))
    if values.row_count:
        parts.append(values)
    if waits := list(state.waits()):
        parts += [Text("\n".join(waits)), Text()]
    pictured = any(answer.pictures for answer in event.after)
    if pictured:
        parts += [Pictures(event.after, state.run_dir), Text()]
    if event.before and event.before == event.after:
        title = f"held-out prompts {after_steps(state.scored or 0)}" if state.scored_other_weights else ""
        parts += [_answers(event.after, title, numbered=pictured), Text()]
    elif event.before and event.after:
        answers = _table("prompt", "expected", "before", "after", title="")
        answers.add_column("reward", justify="right", no_wrap=True)
        for index, (before, after) in enumerate(zip(event.before, event.after, strict=True), start=1):
            prompt, change = _prompt(before, index * pictured), f"{number(before.reward)} -> {number(after.reward)}"
            answers.add_row(prompt, _cell(before.answer), _cell(before.response), _cell(after.response), change)
        parts += [answers, Text()]
    names = max((len(what) for what in event.artifacts), default=0)
    for what, path in event.artifacts.items():
        fits = names + 2 + cell_len(path) <= width
        line = Text(no_wrap=True, overflow="ignore").append(what, style="dim")
        parts.append(line.append(" " * (names + 2 - len(what)) if fits else "\n").append(path))
    return Group(*parts)


def _table(*headings: str, title: str) -> Table:
    table = Table(
        box=None, expand=True, pad_edge=False, title=title or None, title_justify="left", title_style="dim italic"
    )
    for heading in headings:
        table.add_column(heading, header_style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _prompt(answer: SampleShown, index: int) -> _End:
    """With its number in front, unless that is 0."""
    return _End(prompt_text(answer), f"{index}  " if index else "")


@frozen
class _End:
    """A prompt on one line: its end if it does not fit, which the response follows. A chat's examples come before."""

    text: str
    front: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - len(self.front)
        line = printable(self.text[-width - 1 :])
        if cell_len(line) > width:
            line = "\u2026" + set_cell_size(line[::-1], width - 1)[::-1]
        yield Text(self.front + line, no_wrap=True)


def _cell(text: str) -> Text:
    """The literal text: a model's output is never interpreted as rich markup."""
    return Text(printable(text))
