"""Show the run's progress on the terminal or in a log file."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from rich.console import Console as Terminal

from corerl.observability.live import LiveView
from corerl.observability.plain import PlainView
from corerl.observability.run_state import RunState
from corerl.observability.specs import ConsoleOptions
from corerl.plugin.events import Event
from corerl.plugin.hookspecs import hookimpl


class View(Protocol):
    def update(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Console:
    """A live display if standard output is a terminal that can show one, else plain lines."""

    def __init__(self, *, options: ConsoleOptions, run_dir: str) -> None:
        self._view = choose_view(RunState(time.monotonic), Terminal(), every=options.every)

    @hookimpl
    def observe(self, event: Event) -> None:
        self._view.update(event)

    @hookimpl
    def shutdown(self, reason: str) -> None:
        self._view.close()


def choose_view(state: RunState, terminal: Terminal, *, every: int) -> View:
    able = terminal.is_terminal and not terminal.is_dumb_terminal and terminal.encoding.startswith("utf")
    # FORCE_COLOR makes rich take a pipe for a terminal, but cursor movements are useless in a file.
    if able and terminal.file.isatty():
        return LiveView(state, terminal)
    return PlainView(state, sys.stdout, every=every)
