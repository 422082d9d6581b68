"""Ask the fork server of a test session for a process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from corerl.cluster.forks import ANSWER, listen, request_of
from tests.cluster.nodes import session, title_in
from tests.forks.server import PROCESSES, began
from tests.machine import paced

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY, OWNER = "CORERL_TEST_FORKS", "CORERL_TEST_FORKS_OWNER"  # where the server is, and whose end is its own
SERVES = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    # Read as torch is loaded: where a process has more threads, they would turn in circles while they wait.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
}
STARTS_WITHIN = paced(240.0)  # seconds, against hangs


class Forked:
    """What `subprocess.Popen` is to a process of one's own."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        code: str,
        *,
        environment: Mapping[str, str],
        stdout: IO[Any],
        stderr: IO[Any],
        stdin: IO[Any] | Connection | None = None,
        directory: Path | None = None,
    ) -> None:
        request = {
            **request_of(list(map(str, argv))),
            "environment": dict(environment),
            "directory": str(directory or Path.cwd()),
            "leads": True,
            "code": code,
            "session": os.getsid(0),
        }
        self._answers = connect()
        with open(os.devnull, "rb") as nothing:
            given = [each.fileno() for each in (stdin or nothing, stdout, stderr)]
            socket.send_fds(self._answers, [json.dumps(request).encode()], given)
        self.pid = self._answer()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            # 0 would make reading fail at once even where the answer is there.
            self._answers.settimeout(None if timeout is None else max(timeout, 0.001))
            try:
                self.returncode = os.waitstatus_to_exitcode(self._answer())
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self._answers.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, signal.SIGKILL)

    def _answer(self) -> int:
        try:
            answer = self._answers.recv(ANSWER)
        except ConnectionResetError:  # it has ended before it took the request
            answer = b""
        assert answer, gone()
        return int(answer)


def connect() -> socket.socket:
    """To the server, which the first of a session's processes to ask starts."""
    directory = Path(os.environ[DIRECTORY])
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path := directory / "socket").exists():
            with listen(str(path)) as listening:
                # Not a child that someone must wait for: it ends with the test session.
                os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-m", "tests.forks.server", str(directory), os.environ[OWNER]],
                    # The fewer pages, the sooner they are forked: 38 ms of CPU time instead of 47.
                    {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **SERVES},
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, listening.fileno(), 0),
                        (os.POSIX_SPAWN_OPEN, 1, str(directory / "log"), os.O_WRONLY | os.O_CREAT, 0o600),
                        (os.POSIX_SPAWN_DUP2, 1, 2),
                    ],
                    setsid=True,
                )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(STARTS_WITHIN)
    try:
        connection.connect(str(path))
    except ConnectionRefusedError:
        connection.close()
        raise AssertionError(gone()) from None
    return connection


def gone() -> str:
    return f"the fork server is gone: {(Path(os.environ[DIRECTORY]) / 'log').read_text() or 'it said nothing'}"


def processes_of(leader: int) -> dict[int, str]:
    """The processes of a session that run now, and those forked for them, each with its title. (Environments would not
    do: a process that sets its title overwrites what /proc shows of them.)"""
    return session(leader) | forked_for(leader)


def forked_for(leader: int) -> dict[int, str]:
    """The processes forked on behalf of a session's, such as the workers of its Ray."""
    found = {}
    for path in (Path(os.environ[DIRECTORY]) / PROCESSES).glob("*"):
        try:
            if path.read_text() == f"{leader} {began(path.name)}":
                found[int(path.name)] = title_in(Path("/proc") / path.name)
        except OSError:  # it has ended
            path.unlink(missing_ok=True)
    return found


def kill_session(leader: int) -> None:
    for pid in processes_of(leader):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
