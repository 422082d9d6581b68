"""Run one SGLang server as a child process: start it, wait for it, query it over HTTP, end it with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import msgspec

from corerl.errors import EngineFailed, WorkerDied

HOST = "127.0.0.1"
LAST_LINES = 15  # of the log, quoted in error messages
LAST_BYTES = 1 << 16  # of the log, searched for these lines
POLL_SECONDS = 0.2  # between checks of a starting server
HEALTH_SECONDS = 30.0  # for one answer: a launcher's own server may generate a token first, as SGLang does unless told
# An endpoint (in SGLang 0.5.15 and 0.5.17) that the HTTP process answers by itself, whatever its ranks do: it generates
# nothing, asks no scheduler, and works while weights are loaded or memory is released.
PING = "/ping"
EVENT, DONE = b"data: ", b"[DONE]"  # the lines of an answer that comes as it is made, and the last one
MISSES = 3  # failed checks in a row before a server counts as silent, in case the machine stalled for a while
LAST_BREATH = 10.0  # seconds to find out whether a server that broke off has died


class Refused(EngineFailed):
    """The server answers that it will not do what it was asked."""


class Server:
    """The server of one replica. Thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        launcher: str,
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        health_timeout: float,
    ) -> None:
        """Start the server's process and return at once: it imports what it needs, and waits for `configure`.
        `directory`, which others must not be able to read, gets the arguments file with the server's key, and is
        removed at the end. `health_timeout`: seconds of silence after which a server that owes an answer is ended."""
        self._name, self._log, self.directory = name, log, directory
        self._health_timeout = health_timeout
        self._died_of: tuple[str, str] | None = None  # (one line, details)
        self._ending = threading.Lock()  # all waiting threads notice its death at the same moment
        self._counting = threading.Lock()
        self._owed = 0  # answers that may take any time
        self._gone = threading.Event()
        self._pinging = threading.Thread(target=self._ping, daemon=True, name=f"{name} pings its server")
        # Held until the server is gone, to reserve the port during the minute it takes to start: two sockets that both
        # allow it may be bound to one port as long as only one listens.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((HOST, 0))
        self.port: int = self._held.getsockname()[1]
        self._key = secrets.token_hex(16)  # other users of the machine reach the port too
        self._arguments = directory / "arguments.json"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as sink:
                self._log_start = sink.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", launcher, str(self._arguments)],
                    stdin=subprocess.PIPE,  # the server ends when this closes
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        except BaseException:
            self._held.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def configure(self, arguments: Mapping[str, Any]) -> None:
        """Let the server start with `arguments`; call `wait_ready` next."""
        own = {"host": HOST, "port": self.port, "api_key": self._key}
        partial = self._arguments.with_suffix(".partial")
        partial.write_text(json.dumps({**arguments, **own}, indent=1))
        os.replace(partial, self._arguments)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server is healthy. If it ends or takes longer, ends it and raises EngineFailed."""
        deadline = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None:
                failed = EngineFailed(f"{self._name}: its server {self._ended()} during startup; {self._last_lines()}")
                self.stop()
                raise failed
            with contextlib.suppress(OSError, HTTPException):  # not listening yet
                if self._ask("GET", "/health", None, timeout=HEALTH_SECONDS)[0] == 200:
                    self._pinging.start()
                    return
            if time.monotonic() > deadline:
                late = EngineFailed(
                    f"{self._name}: its server was not ready within {timeout:g} s; raise "
                    f"engines.sglang.start_timeout, or find out what delays it; {self._last_lines()}"
                )
                self.stop()
                raise late
            time.sleep(POLL_SECONDS)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def require_alive(self, during: str) -> None:
        """Raise WorkerDied if the process is gone."""
        if not self.alive:
            raise self._died(during)

    def get(self, path: str) -> Any:
        return json.loads(self._answer("GET", path, None))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, at_once: bool = False) -> bytes:
        """Post a request; returns the answer. Raises WorkerDied if the server is or becomes dead, Refused if it answers
        so, EngineFailed if it hangs up but still runs. An answer may take any time, but a server that meanwhile does
        not even answer pings is ended, and counts as dead; as does one that does not give an answer that it has
        `at_once`, since its HTTP process asks nobody else."""
        if at_once:
            return self._answer("POST", path, body or {})
        with self._streaming(path, body or {}) as response:
            return response.read()

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
        """Post a request; yields the data of each event of its answer. Raises as `post`."""
        with self._streaming(path, body) as response:
            for line in response:
                if line.startswith(EVENT) and (data := line.removeprefix(EVENT).strip()) != DONE:
                    yield data

    def give_up(self, why: str) -> None:
        """End a server that still runs, and counts as dead then: it `why`."""
        self._end(why)

    def stop(self) -> None:
        """End the server and all its children, and remove its directory; idempotent."""
        self._end()
        self._held.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _end(self, why: str = "") -> tuple[str, str]:
        """End the server and return the cause, as (one line, details). Determined once, before its directory, which may
        hold the log, is removed. `why` is the cause if it is still running."""
        with self._ending:
            if self._died_of is None:
                last, more = self._last_lines(1), self._last_lines()
                if self._process.stdin is not None:
                    self._process.stdin.close()
                self._gone.set()
                # Only once, since the process group's id may be reused later. Ranks may outlive the server.
                with contextlib.suppress(ProcessLookupError):  # all have ended already
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                self._died_of = f"{why or self._ended()}; {last}", more
            shutil.rmtree(self.directory, ignore_errors=True)  # its own watcher died with it
            return self._died_of

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        """An answer that comes within the health timeout."""
        with self._failing(path):
            status, answer = self._ask(method, path, body, timeout=self._health_timeout)
            return self._accepted(path, status, answer)

    @contextlib.contextmanager
    def _streaming(self, path: str, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
        """An answer that may take any time, and is read within the context."""
        with self._failing(path), self._owing(), contextlib.closing(HTTPConnection(HOST, self.port)) as connection:
            self._send(connection, "POST", path, body)
            response = connection.getresponse()
            if response.status != 200:
                self._accepted(path, response.status, response.read())
            yield response

    def _accepted(self, path: str, status: int, answer: bytes) -> bytes:
        if status != 200:
            raise Refused(f"{self._name}: its server refused {path} with status {status}: {_message(answer)}")
        return answer

    @contextlib.contextmanager
    def _failing(self, path: str) -> Iterator[None]:
        """Raise WorkerDied or EngineFailed for a connection that fails within the context."""
        self.require_alive(path)
        try:
            yield
        except TimeoutError as silent:
            self._end_silent()
            raise self._died(path) from silent
        except (OSError, HTTPException) as error:
            try:
                self._process.wait(LAST_BREATH)
            except subprocess.TimeoutExpired:
                raise EngineFailed(
                    f"{self._name}: its server did not answer {path} ({type(error).__name__}: {error}), but is still "
                    f"running; {self._last_lines(1)}"
                ) from error
            raise self._died(path) from error

    def _end_silent(self) -> None:
        if self.alive:
            self._end(f"did not respond for {self._health_timeout:g} s (engines.sglang.health_timeout) and was killed")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises TimeoutError if accepting the request, starting the answer or
        continuing it takes longer than `timeout` seconds."""
        with contextlib.closing(HTTPConnection(HOST, self.port, timeout=timeout)) as connection:
            self._send(connection, method, path, body)
            response = connection.getresponse()
            return response.status, response.read()

    def _send(self, connection: HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        connection.request(method, path, content, headers)

    @contextlib.contextmanager
    def _owing(self) -> Iterator[None]:
        """Within it, a server that answers no pings is ended, which ends the connections to it."""
        with self._counting:
            self._owed += 1
        try:
            yield
        finally:
            with self._counting:
                self._owed -= 1

    def _ping(self) -> None:
        """As long as the server runs: SGLang ends itself if a batch hangs, but its HTTP process may hang too."""
        pause = self._health_timeout / (2 * MISSES)
        missed = 0
        while not self._gone.wait(pause):
            missed = missed + 1 if self._owed and not self._is_there(pause) else 0
            if missed == MISSES:
                self._end_silent()

    def _is_there(self, timeout: float) -> bool:
        """Whether the server answers a ping, with any status."""
        try:
            self._ask("GET", PING, None, timeout=timeout)
        except (OSError, HTTPException):
            return False
        return True

    def _died(self, during: str) -> WorkerDied:
        what, details = self._end()
        died = WorkerDied(f"{self._name}: its server {what} (during {during})")
        died.details = details
        return died

    def _ended(self) -> str:
        code = self._process.poll()
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def _last_lines(self, count: int = LAST_LINES) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - LAST_BYTES))
                lines = [text for text in file.read().decode(errors="replace").splitlines() if text.strip()]
        except OSError as error:  # it was removed; the error that quotes it matters more
            return f"its log cannot be read ({error})"
        if not lines:
            return f"it wrote nothing to {self._log}"
        if count == 1:
            return f"its log {self._log} ends with: {lines[-1]}"
        return "\n".join([f"its log {self._log} ends with:", *lines[-count:]])


def _message(answer: bytes) -> str:
    """Extract the error message, which SGLang's endpoints put in one of three places."""
    text = answer.decode(errors="replace")
    try:
        answered = json.loads(text)
        error = answered.get("error", answered)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text.strip()
