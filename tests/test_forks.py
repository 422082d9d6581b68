"""A process forked by `tests.forks` is what a started one would be: arguments, streams, environment, status, end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forks.client import Forked, forked_for, processes_of
from tests.machine import paced

pytestmark = pytest.mark.processes

SHOWS = """
import json, os, sys
given = [sys.argv, os.getcwd(), os.environ["WORD"], "PATH" in os.environ, sys.stdin.read()]
print(json.dumps([*given, ["torch" in sys.modules, "tests" in sys.modules], os.getsid(0)]))
print("told", file=sys.stderr)
sys.exit(3)
"""


def forked(tmp_path: Path, code: str, *argv: str, said: str = "", **environment: str) -> Forked:
    (tmp_path / "in").write_text(said)
    with (
        (tmp_path / "in").open("rb") as stdin,
        (tmp_path / "out").open("wb") as stdout,
        (tmp_path / "err").open("wb") as stderr,
    ):
        return Forked(
            argv, code, environment=environment, directory=tmp_path, stdin=stdin, stdout=stdout, stderr=stderr
        )


def test_one_that_runs_is_listed_and_ends_by_its_signal(tmp_path: Path) -> None:
    process = forked(tmp_path, "import time; print('begun', flush=True); time.sleep(600)", "sleeper")
    deadline = time.monotonic() + paced(60.0)
    while not (tmp_path / "out").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert list(processes_of(process.pid)) == [process.pid]
    assert process.pid in forked_for(os.getsid(0))
    process.kill()
    assert process.wait(paced(60.0)) == process.poll() == -signal.SIGKILL
    assert processes_of(process.pid) == {}


def ran(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)


def test_a_python_program_is_forked_with_its_words_streams_and_status(tmp_path: Path, forked_python: None) -> None:
    done = ran("-u", "-c", SHOWS, "word", cwd=tmp_path, input="heard", env={**os.environ, "WORD": "own"})
    assert (done.returncode, done.stderr) == (3, "told\n")
    words, directory, _, _, heard, imported, _ = json.loads(done.stdout)
    assert (words, directory, heard) == (["-c", "word"], str(tmp_path), "heard")
    assert imported == [True, False]
    (tmp_path / "program.py").write_text("import sys\nprint(__name__, __file__, sys.argv)\nraise SystemExit('no')\n")
    done = ran("-m", "program", "word", cwd=tmp_path)
    file = str(tmp_path / "program.py")
    assert (done.returncode, done.stderr, done.stdout) == (1, "no\n", f"__main__ {file} {[file, 'word']}\n")


def test_signals_end_it_whoever_sends_them(forked_python: None) -> None:
    done = ran("-X", "faulthandler", "-c", "import os\n\nos.abort()")
    assert done.returncode == -signal.SIGABRT
    assert "line 3 in <module>" in done.stderr
    for number in (signal.SIGTERM, signal.SIGKILL):
        code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert pid != started.pid and pid in forked_for(os.getsid(0))
        started.send_signal(number)
        assert started.wait(paced(60.0)) == -number
        deadline = time.monotonic() + paced(60.0)
        while pid in forked_for(os.getsid(0)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started.stdout.close()


UNMARKED = """
import subprocess
import pytest

def test_alone(): pass

@pytest.mark.processes
def test_marked(): subprocess.run(["true"], check=True)

def test_unmarked(): subprocess.run(["true"], check=True)
"""


def test_a_test_that_starts_a_process_without_the_mark_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(UNMARKED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    done = subprocess.run([*command, tmp_path / "test_some.py"], capture_output=True, text=True, check=False)
    assert "it starts processes without pytest.mark.processes: subprocess.Popen" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 failed, 2 passed")
