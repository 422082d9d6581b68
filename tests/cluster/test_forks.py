"""Workers that a server forks, as Ray starts them: by a command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from corerl.cluster.forks import Forks, fork_server
from tests.machine import paced

pytestmark = pytest.mark.processes

# A library that is slow to import, and a worker that says who it is, then waits for a line.
LIBRARY = "import os\nIMPORTED_BY = os.getpid()"
WORKER = """
import json, os, resource, sys
import slow_library
seen = {"pid": os.getpid(), "parent": os.getppid(), "imported": slow_library.IMPORTED_BY, "arguments": sys.argv[1:]}
seen |= {"group": os.getpgrp()}
seen |= {"variable": os.environ.get("MINE"), "server's": os.environ.get("ITS"), "directory": os.getcwd()}
seen |= {"name": __name__, "path": sys.path[0], "files": resource.getrlimit(resource.RLIMIT_NOFILE)}
seen |= {"oom": open("/proc/self/oom_score_adj").read()}
print(json.dumps(seen), flush=True)
sys.stdin.readline()
"""
FAILING = """
import errno
fork = os.fork
def fail():
    os.fork = fork
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = fail
"""
DYING = """
import signal, time
fork = os.fork
def die():
    server = os.getpid()
    if fork():
        time.sleep(1000)
    with open(__file__.replace("slow_library.py", "forked"), "w") as file:
        file.write(str(os.getpid()))
    os.kill(server, signal.SIGKILL)
    while os.getppid() == server:
        time.sleep(0.001)
    return 0
os.fork = die
"""
HANDLES = "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); "
DRIVER = """
import sys
from corerl.cluster.forks import fork_server
with fork_server(["slow_library"], {}) as forks:
    print(forks.command({}), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_library.py").write_text(LIBRARY)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@contextlib.contextmanager
def server(environment: Mapping[str, str], *modules: str) -> Iterator[Forks]:
    with fork_server(modules or ["slow_library"], environment) as forks:
        assert forks is not None
        yield forks


@contextlib.contextmanager
def started(command: str, files: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """A worker, and what it says."""
    limits = "ulimit -Sn 777; echo 300 > /proc/self/oom_score_adj"  # as Ray sets some
    line = f"{limits}; exec {command or sys.executable} {files / 'worker.py'} --number 3"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, **variables}
    with subprocess.Popen(["bash", "-c", line], env=environment, cwd=files, **streams) as process:  # type: ignore[call-overload]
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def ended(pid: object) -> Callable[[], bool]:
    def check() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    return check


def catches(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + paced(20.0)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_worker_is_as_python_would_start_it(files: Path) -> None:
    with server({"ITS": "1"}) as forks, started("", files, MINE="a b") as (_, usual):
        with started(forks.command({"ITS": "1"}), files, MINE="a b") as (process, forked):
            own = ("pid", "parent", "imported", "group")
            assert {key: forked[key] for key in forked if key not in own} == {
                key: usual[key] for key in usual if key not in own
            }
            assert usual["imported"] == usual["pid"]
            assert forked["imported"] == forked["parent"] != forked["pid"]
            assert forked["group"] == forked["pid"]  # Ray ends a worker with its group
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            assert process.wait(paced(20.0)) == 0
            assert ended(forked["pid"])()


def test_a_worker_is_killed_with_the_process_that_ray_has_started(files: Path) -> None:
    with server({}) as forks, started(forks.command({}), files) as (process, forked):
        process.kill()
        wait_until(ended(forked["pid"]))


def test_server_and_workers_end_with_the_driver(files: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with driver, started(driver.stdout.readline().strip(), files) as (_, forked):  # type: ignore[union-attr]
        driver.send_signal(signal.SIGKILL)
        wait_until(ended(forked["parent"]))
        wait_until(ended(forked["pid"]))


def test_workers_start_as_usual_once_the_server_has_ended(files: Path) -> None:
    with server({}) as forks:
        command = forks.command({})
    with started(command, files) as (process, usual):
        assert usual["imported"] == usual["pid"] == process.pid


def test_there_is_no_server_without_modules() -> None:
    with fork_server([], {}) as forks:
        assert forks is None


def test_a_server_with_threads_says_so_and_forks_nobody(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "\nimport sys, threading, time\nprint('imported', file=sys.stderr)"
    code += "\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    (files / "slow_library.py").write_text(LIBRARY + code)
    with server({}, "json", "slow_library") as forks, started(forks.command({}), files) as (process, usual):
        assert usual["imported"] == usual["pid"] == process.pid
    notes = [line for line in capfd.readouterr().err.splitlines() if line != "imported"]  # of the worker
    assert [line.partition(", which ")[0] for line in notes] == [
        "corerl: note: slow_library starts threads when it is imported"
    ]


def test_the_next_worker_is_forked_after_a_fork_that_failed(files: Path) -> None:
    (files / "slow_library.py").write_text(LIBRARY + FAILING)
    with server({}) as forks:
        with started(forks.command({}), files) as (process, usual):
            assert usual["imported"] == usual["pid"] == process.pid
        with started(forks.command({}), files) as (_, forked):
            assert forked["imported"] == forked["parent"]


def test_a_worker_whose_server_ends_before_it_watches_it_ends_too(files: Path) -> None:
    (files / "slow_library.py").write_text(LIBRARY + DYING)
    with server({}) as forks, started(forks.command({}), files) as (process, usual):
        assert usual["imported"] == usual["pid"] == process.pid
        wait_until(ended((files / "forked").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_what_ray_has_started_ends_as_its_worker(number: signal.Signals, files: Path) -> None:
    with server({}) as forks, started(forks.command({}), files) as (process, forked):
        os.kill(int(str(forked["pid"])), number)
        assert process.wait(paced(20.0)) == -number


def test_signals_are_handed_on_to_a_worker(files: Path) -> None:
    (files / "worker.py").write_text(WORKER.replace("print(", HANDLES + "print("))
    with server({}) as forks, started(forks.command({}), files) as (process, _):
        wait_until(lambda: catches(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGTERM)
        assert process.wait(paced(20.0)) == 7


def test_a_module_that_cannot_be_imported_is_left_to_the_worker(files: Path) -> None:
    with server({}, "no_such_module", "slow_library") as forks, started(forks.command({}), files) as (_, forked):
        assert forked["imported"] == forked["parent"]


def test_only_workers_with_the_servers_variables_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    with server({"ITS": "1"}, "json") as forks:
        assert forks.command({"ITS": "1", "INHERITED": "yes"}) != ""
        assert forks.command({"ITS": "2"}) == forks.command({"INHERITED": "no"}) == forks.command({"MORE": ""}) == ""


def test_a_directory_too_long_for_a_socket_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with fork_server(["json"], {}) as forks:
        assert forks is None
    assert list(deep.iterdir()) == []
