"""Workers that a server forks, as Ray starts them: by a command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corerl.cluster.forks import fork_server, worker_command
from tests.ended import alive, gone
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
DRIVER = """
import sys
from corerl.cluster.forks import fork_server, worker_command
with fork_server(["slow_library"], {}):
    print(worker_command({}), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_library.py").write_text(LIBRARY)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@contextlib.contextmanager
def started(command: str, files: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
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


def test_a_forked_worker_is_as_python_would_start_it(files: Path) -> None:
    with fork_server(["slow_library"], {"ITS": "1"}), started("", files, MINE="a b") as (_, usual):
        with started(worker_command({"ITS": "1"}), files, MINE="a b") as (process, forked):
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
            assert not alive(forked["pid"])


def test_a_worker_is_killed_with_rays_process(files: Path) -> None:
    with fork_server(["slow_library"], {}), started(worker_command({}), files) as (process, forked):
        process.kill()
        assert gone([forked["pid"]])


def test_server_and_workers_end_with_the_driver(files: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with driver, started(driver.stdout.readline().strip(), files) as (_, forked):  # type: ignore[union-attr]
        driver.send_signal(signal.SIGKILL)
        assert gone([forked["parent"], forked["pid"]])


def test_workers_start_as_usual_without_a_server(files: Path) -> None:
    with fork_server([], {}):
        command = worker_command({})
    with started(command, files) as (process, usual):
        assert usual["imported"] == usual["pid"] == process.pid


def test_a_server_with_threads_forks_nobody(files: Path) -> None:
    code = "\nimport threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    (files / "slow_library.py").write_text(LIBRARY + code)
    with fork_server(["slow_library"], {}), started(worker_command({}), files) as (process, usual):
        assert usual["imported"] == usual["pid"] == process.pid


def test_a_broken_module_is_left_to_the_worker(files: Path) -> None:
    with fork_server(["no_such_module", "slow_library"], {}), started(worker_command({}), files) as (_, forked):
        assert forked["imported"] == forked["parent"]


def test_only_workers_with_the_servers_variables_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    assert worker_command({}) == ""
    with fork_server(["json"], {"ITS": "1"}):
        assert worker_command({"ITS": "1", "INHERITED": "yes"}) != ""
        assert worker_command({"ITS": "2"}) == worker_command({"INHERITED": "no"}) == worker_command({"MORE": ""}) == ""
    assert worker_command({}) == ""


def test_a_directory_too_long_for_a_socket_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with fork_server(["json"], {}):
        assert worker_command({}) == ""
    assert list(deep.iterdir()) == []
