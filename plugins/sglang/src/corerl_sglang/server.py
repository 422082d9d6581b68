"""One SGLang server as a child process: started, waited for, asked over HTTP, and ended with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import msgspec

from corerl.errors import EngineFailed, WorkerDied

HOST = "127.0.0.1"
LAST_LINES = 15  # of the log, in an error's message
LAST_BYTES = 1 << 16  # among which these are looked for
LOOK_SECONDS = 0.2  # between looks at a server that starts
HEALTH_SECONDS = 30.0  # for one answer: SGLang generates a token before it says that it is well
# Of SGLang's endpoints (0.5.15 and 0.5.17) one that its HTTP process answers by itself, whatever its ranks do: it
# generates nothing, asks no scheduler, and is there while weights are loaded or memory is given back.
PING = "/ping"
LOOKS = 3  # in a row at which a server must be silent, so that a machine that stood still for a while ends none
LAST_BREATH = 10.0  # seconds in which a server that does not answer may still turn out to have died


class Server:
    """A server of one replica. Its methods may be called from several threads."""

    def __init__(
        self,
        name: str,
        *,
        launcher: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        health_timeout: float,
    ) -> None:
        """Starts it, and returns at once; `wait_ready` follows. `directory` takes the file of its arguments, and is
        removed when it ends. `health_timeout`: seconds of silence after which a server that owes an answer is ended."""
        self._name, self._log, self._directory = name, log, directory
        self._health_timeout = health_timeout
        self._died_of: tuple[str, str] | None = None  # in one line, and in more
        self._ending = threading.Lock()  # all that wait for it learn that it is gone at the same moment
        # Held until the server is gone: two sockets that both allow it may be bound to one port as long as only one
        # listens. A server takes a minute to get there, and meanwhile no one else is given the port.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((HOST, 0))
        self.port: int = self._held.getsockname()[1]
        file = directory / "arguments.json"
        file.write_text(json.dumps({**arguments, "host": HOST, "port": self.port}, indent=1))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self._log_start = sink.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", launcher, str(file)],
                stdin=subprocess.PIPE,  # it ends when this closes
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout: float) -> None:
        """Returns when it is well. Raises EngineFailed, and ends it, where it ends first or takes longer."""
        deadline = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None:
                failed = EngineFailed(f"{self._name}: its server {self._ended()} as it started; {self._last_lines()}")
                self.stop()
                raise failed
            with contextlib.suppress(OSError, HTTPException):  # it does not listen yet
                if self._ask("GET", "/health", None, timeout=HEALTH_SECONDS)[0] == 200:
                    return
            if time.monotonic() > deadline:
                late = EngineFailed(
                    f"{self._name}: its server was not ready in {timeout:g} s; give it longer by "
                    f"engines.sglang.start_timeout, or see what holds it; {self._last_lines()}"
                )
                self.stop()
                raise late
            time.sleep(LOOK_SECONDS)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def require_alive(self, during: str) -> None:
        """Raises WorkerDied where the process is gone."""
        if not self.alive:
            raise self._died(during)

    def get(self, path: str) -> Any:
        return json.loads(self._answer("GET", path, None))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """What it answers. Raises WorkerDied where the server has died, before or in it, and EngineFailed where it
        refuses, or hangs up and still runs. An answer may take as long as it likes. A server that meanwhile does not
        even say that it is there is ended, and has died."""
        return self._answer("POST", path, body or {})

    def stop(self) -> None:
        """End it and all that it has started, and remove what it was told; idempotent."""
        self._end()
        self._held.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _end(self, why: str = "") -> tuple[str, str]:
        """What it has died of, in one line and in more: once, before its directory goes, where its log may be. `why`
        is for one that still runs."""
        with self._ending:
            if self._died_of is None:
                last, more = self._last_lines(1), self._last_lines()
                if self._process.stdin is not None:
                    self._process.stdin.close()
                # Once, since later the number of its process group may be another's; its ranks may outlive it.
                with contextlib.suppress(ProcessLookupError):  # all have ended
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                self._died_of = f"{why or self._ended()}; {last}", more
            shutil.rmtree(self._directory, ignore_errors=True)  # its watcher is gone with it
            return self._died_of

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        self.require_alive(path)
        try:
            status, answer = self._ask(method, path, body, timeout=self._health_timeout, watched=True)
        except TimeoutError as silent:
            if self.alive:
                limit = f"{self._health_timeout:g} s (engines.sglang.health_timeout)"
                self._end(f"gave no sign of life for {limit} and was ended")
            raise self._died(path) from silent
        except (OSError, HTTPException) as error:
            try:
                self._process.wait(LAST_BREATH)
            except subprocess.TimeoutExpired:
                raise EngineFailed(
                    f"{self._name}: its server gave no answer to {path} ({type(error).__name__}: {error}) and still "
                    f"runs; {self._last_lines(1)}"
                ) from error
            raise self._died(path) from error
        if status != 200:
            raise EngineFailed(f"{self._name}: its server refused {path} with status {status}: {_message(answer)}")
        return answer

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout: float, watched: bool = False
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises TimeoutError where the server does not take the request, begin its
        answer or go on with it in `timeout` seconds each. If `watched`, the answer may begin as late as it likes while
        the server answers others: SGLang ends itself where a batch hangs."""
        connection = HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            if watched:
                self._wait(connection.sock, timeout)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _wait(self, sock: socket.socket, limit: float) -> None:
        """Returns when an answer begins, or the connection ends. Raises TimeoutError after `limit` seconds in which the
        server answered no `PING` either. In the caller's thread, which has nothing else to do; looking at what has come
        without taking it, since http.client cannot go on with an answer whose beginning it has timed out on."""
        sock.settimeout(limit / (2 * LOOKS))
        missed = 0
        while missed < LOOKS:
            try:
                sock.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                missed = 0 if self._is_there(limit / (2 * LOOKS)) else missed + 1
            else:
                sock.settimeout(limit)
                return
        raise TimeoutError

    def _is_there(self, timeout: float) -> bool:
        """Whether somebody is there; with which status, is all one."""
        try:
            self._ask("GET", PING, None, timeout=timeout)
        except (OSError, HTTPException):
            return False
        return True

    def _died(self, during: str) -> WorkerDied:
        what, details = self._end()
        died = WorkerDied(f"{self._name}: its server {what} (asked for {during})")
        died.details = details
        return died

    def _ended(self) -> str:
        code = self._process.poll()
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def _last_lines(self, count: int = LAST_LINES) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - LAST_BYTES))
                lines = [text for text in file.read().decode(errors="replace").splitlines() if text.strip()]
        except OSError as error:  # somebody has removed it; what is told with it weighs more
            return f"its log cannot be read ({error})"
        if not lines:
            return f"it wrote nothing to {self._log}"
        if count == 1:
            return f"its log {self._log} ends with: {lines[-1]}"
        return "\n".join([f"its log {self._log} ends with:", *lines[-count:]])


def _message(answer: bytes) -> str:
    """An error's message, which SGLang's endpoints have in one of three places."""
    text = answer.decode(errors="replace")
    try:
        told = json.loads(text)
        error = told.get("error", told)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text.strip()
