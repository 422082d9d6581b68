"""A child process: waited for, asked, and gone when it must be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corerl.errors import EngineFailed, WorkerDied
from corerl_sglang import server as module
from corerl_sglang.server import Server

pytestmark = pytest.mark.processes

QUICK = "plugins.sglang.tests.quick"


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.stop()


def start(
    servers: list[Server],
    directory: Path,
    health_timeout: float = 60.0,
    log: str = "logs/engine-0.log",
    **given: Any,
) -> Server:
    own = directory / "own"
    own.mkdir(exist_ok=True)
    how: dict[str, Any] = {"launcher": QUICK, "environment": {}, "health_timeout": health_timeout}
    server = Server("engine-0", **how, directory=own, log=directory / log)
    servers.append(server)
    server.configure(given)
    return server


def rank_of(directory: Path) -> int:
    """The process that the server has started, once it has."""
    for _ in range(600):
        lines = (directory / "logs" / "engine-0.log").read_text().splitlines()
        if found := [line.split()[1] for line in lines if line.startswith("rank ")]:
            return int(found[0])
        time.sleep(0.1)
    raise AssertionError("no rank was started")


def gone(pid: int) -> bool:
    """Within ten seconds; a zombie, whose parent did not wait for it, is gone too."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_a_late_server_ends_with_all_its_processes(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(servers, tmp_path, mode="well", seconds=0.5)
    server.wait_ready(60.0)
    rank = rank_of(tmp_path)
    with pytest.raises(EngineFailed, match="engine-0: its server refused /refuse with status 400: not so"):
        server.post("/refuse")
    monkeypatch.setattr(module, "LAST_BREATH", 0.1)
    with pytest.raises(EngineFailed, match="did not answer /silent .* but is still running; its log .* with: rank"):
        server.post("/silent")
    server.stop()
    assert gone(rank) and not (tmp_path / "own").exists()
    with pytest.raises(WorkerDied, match=r"engine-0: its server was killed by SIGKILL; .* \(during /refuse\)"):
        server.post("/refuse")


def test_a_slow_server_that_answers_pings_is_waited_for(servers: list[Server], tmp_path: Path) -> None:
    server = start(servers, tmp_path, mode="well", health_timeout=2.0)
    server.wait_ready(60.0)
    assert server.post("/slow?seconds=3") == b"late"


@pytest.mark.parametrize("when", ["while it takes the request", "within its answer"])
def test_a_silent_server_is_killed_with_its_processes(servers: list[Server], tmp_path: Path, when: str) -> None:
    server = start(servers, tmp_path, mode="well", health_timeout=0.5)
    server.wait_ready(60.0)
    path, body = "/stops_within", {}
    if when == "while it takes the request":
        os.kill(server.pid, signal.SIGSTOP)
        path, body = "/refuse", {"large": "x" * (1 << 26)}  # more than sockets buffer
    silent = r"engine-0: its server did not respond for 0.5 s \(engines.sglang.health_timeout\) and was killed; its log"
    with pytest.raises(WorkerDied, match=rf"{silent} .* ends with: rank .* \(during {path}\)"):
        server.post(path, body)
    assert gone(server.pid) and gone(rank_of(tmp_path)) and not (tmp_path / "own").exists()


def test_all_callers_of_a_dead_server_get_its_last_lines(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    server = start(servers, tmp_path, log="own/log", mode="well")  # as without a run's directory
    server.wait_ready(60.0)
    read, callers = server._last_lines, set()

    def slowly(count: int = module.LAST_LINES) -> str:
        """The later one comes, the slower it is: all are here when the first goes on, and others when it has ended."""
        callers.add(threading.get_ident())
        time.sleep(0.3 * len(callers))
        return read(count)

    monkeypatch.setattr(server, "_last_lines", slowly)

    def ask() -> str:
        try:
            return str(server.post("/slow?seconds=30"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(ask) for _ in range(4)]
        time.sleep(0.5)
        os.kill(server.pid, signal.SIGKILL)
        told = {call.result() for call in calls}
    (said,) = told
    assert said.startswith(f"WorkerDied: engine-0: its server was killed by SIGKILL; its log {own}/log ends with: ")
    assert not own.exists()


def test_a_failed_start_is_reported_with_the_last_lines(servers: list[Server], tmp_path: Path) -> None:
    with pytest.raises(EngineFailed) as raised:
        start(servers, tmp_path, mode="fails").wait_ready(60.0)
    log = tmp_path / "logs" / "engine-0.log"
    assert raised.value.message == (
        f"engine-0: its server exited with status 1 during startup; its log {log} ends with:\n"
        "loading the model\nout of memory: the KV cache does not fit"
    )


def test_one_that_is_never_well_is_ended_at_its_deadline(servers: list[Server], tmp_path: Path) -> None:
    server = start(servers, tmp_path, mode="never well")
    rank = rank_of(tmp_path)
    with pytest.raises(EngineFailed, match=r"its server was not ready within 0.3 s; raise .*\n.*\nrank"):
        server.wait_ready(0.3)
    assert gone(server.pid) and gone(rank)


def test_it_ends_with_its_parent_even_where_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from plugins.sglang.tests.test_server import start
server = start([], pathlib.Path({str(tmp_path)!r}), mode="well")
server.wait_ready(60.0)
print(server.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
        os.kill(parent.pid, signal.SIGKILL)
        assert gone(pid) and gone(rank_of(tmp_path)) and not (tmp_path / "own").exists()
