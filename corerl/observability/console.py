"""Show the run's progress on the terminal or in a log file."""

from __future__ import annotations

import sys
import time

from corerl.errors import PluginConflict
from corerl.observability.plain import PlainView
from corerl.observability.run_state import RunState
from corerl.observability.specs import ConsoleOptions
from corerl.plugin.events import Event
from corerl.plugin.registry import Kind, load, load_implementation, scan
from corerl.plugin.spec import Display


class Console:
    """The display that is installed, if standard output is a terminal that it can use, else plain lines."""

    def __init__(self, *, options: ConsoleOptions, run_dir: str) -> None:
        shown = display() if sys.stdout.isatty() else None
        lines = PlainView(RunState(time.monotonic), sys.stdout, every=options.every)
        self._display: Display = lines if shown is None else shown

    def observe(self, event: Event) -> None:
        self._display.update(event)

    def shutdown(self, reason: str) -> None:
        self._display.close()


def display() -> Display | None:
    """The display that is installed, if there is one and it can use this terminal. Raises PluginConflict if there are
    several, and as `load` does."""
    found = scan(Kind.DISPLAYS)
    if len(found) > 1:
        raise PluginConflict(
            f"the displays {' and '.join(map(str, found))} are installed, and a terminal can show one; uninstall "
            f"{' or '.join(entry.distribution for entry in found)}"
        )
    made = load_implementation(Kind.DISPLAYS, load(Kind.DISPLAYS, found[0].name)) if found else None
    return made() if made is not None else None
