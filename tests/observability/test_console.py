from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from corerl.errors import PluginConflict
from corerl.observability import console
from corerl.observability.console import Console
from corerl.observability.specs import ConsoleOptions
from corerl.plugin import registry
from corerl.plugin.registry import Kind
from tests.observability.run import whole

Install = Callable[..., Path]


DISPLAY = """
from corerl.plugin import DisplaySpec
SPEC = DisplaySpec(implementation="NAME_code:shown", api=(2, 0), summary="a display")
"""
CODE = """
class Shown(list):
    update = list.append
    close = lambda self: self.append("closed")
def shown():
    return Shown() if {able} else None
"""


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No display but the test's own is installed."""
    there = {entry.distribution for entry in registry.scan(Kind.DISPLAYS)}
    scan = registry.scan
    monkeypatch.setattr(console, "scan", lambda kind: [each for each in scan(kind) if each.distribution not in there])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("terminal", "able"), [(True, True), (True, False), (False, True)])
def test_a_display_that_can_use_the_terminal_takes_the_place_of_lines(
    install: Install, monkeypatch: pytest.MonkeyPatch, terminal: bool, able: bool
) -> None:
    install(
        "corerl-shows",
        {"displays": {"mine": "mine_d:SPEC"}},
        mine_d=DISPLAY.replace("NAME", "mine_d"),
        mine_d_code=CODE.format(able=able),
    )
    stream = Tty() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    events = [*whole("runs/small")]
    shows = Console(options=ConsoleOptions(), run_dir="runs/small")
    for event in events:
        shows.observe(event)
    shows.shutdown("finished")
    if terminal and able:
        assert [*shows._display, stream.getvalue()] == [*events, "closed", ""]  # type: ignore[misc]
    else:
        assert "finished after 4 of 4 steps" in stream.getvalue()


@pytest.mark.usefixtures("alone")
def test_two_displays_are_a_conflict(install: Install) -> None:
    assert console.display() is None
    for name in ("one", "two"):
        install(f"corerl-{name}", {"displays": {name: f"{name}_d:SPEC"}}, **{f"{name}_d": DISPLAY})
    with pytest.raises(PluginConflict) as caught:
        console.display()
    assert caught.value.message == (
        "the displays 'one' (corerl-one 0.1.0) and 'two' (corerl-two 0.1.0) are installed, and a terminal can show "
        "one; uninstall corerl-one or corerl-two"
    )


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_piped_output_holds_no_control_codes(encoding: str, tmp_path: object) -> None:
    code = (
        "import sys\n"
        "from corerl.observability.console import Console\n"
        "from corerl.observability.specs import ConsoleOptions\n"
        "from corerl.plugin.events import Notice\n"
        "from tests.observability.run import whole\n"
        "console = Console(options=ConsoleOptions(), run_dir=sys.argv[1])\n"
        "for event in [*whole(sys.argv[1]), Notice(text='\\u00e9')]:\n"
        "    console.observe(event)\n"
        "console.shutdown('finished')\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, env=environment)
    text = done.stdout.decode(encoding)
    assert "finished after 4 of 4 steps, 1:15" in text
    assert text.splitlines()[-1] == ("note: é" if encoding == "utf-8" else "note: \\xe9")
    assert all(character.isprintable() or character == "\n" for character in text)
