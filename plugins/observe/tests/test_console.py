from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from corerl_observe.console import Console
from corerl_observe.specs import ConsoleOptions
from tests.observability.run import whole


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "lines"), [(Tty(), "xterm", 0), (Tty(), "dumb", 1), (io.StringIO(), "xterm", 1)]
)
def test_an_able_terminal_gets_the_live_display_in_place_of_lines(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, term: str, lines: int
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdout", stream)
    shows = Console(options=ConsoleOptions(), run_dir="runs/small")
    for event in whole("runs/small"):
        shows.observe(event)
    shows.shutdown("finished")
    assert "finished after 4 of 4 steps" in stream.getvalue()
    assert stream.getvalue().count("checkpoint after step 4: ") == lines


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_piped_output_holds_no_control_codes(encoding: str, tmp_path: object) -> None:
    code = (
        "import sys\n"
        "from corerl_observe.console import Console\n"
        "from corerl_observe.specs import ConsoleOptions\n"
        "from corerl.plugin import Notice\n"
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
