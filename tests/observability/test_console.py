from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console as Terminal

from corerl.observability.console import choose_view
from corerl.observability.live import LiveView
from corerl.observability.plain import PlainView
from corerl.observability.run_state import RunState
from tests.observability.run import Clock


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "environment", "view"),
    [
        (Tty(), {"TERM": "xterm"}, LiveView),
        (Tty(), {"TERM": "dumb"}, PlainView),
        (io.StringIO(), {"TERM": "xterm"}, PlainView),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, PlainView),
    ],
)
def test_only_an_able_terminal_gets_the_live_display(
    file: io.StringIO, environment: dict[str, str], view: type
) -> None:
    assert type(choose_view(RunState(Clock()), Terminal(file=file, _environ=environment), every=1)) is view


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
