"""An environment's server in a process of its own, on a loopback port; `python -m` this module is the process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from corerl.errors import ConfigError

START = 120.0  # seconds for the environment to be imported and to answer
POLL = 0.1
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server:
    """Starts at construction. Raises ConfigError if it ends, or does not answer in time."""

    def __init__(self, application: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  -- as long as the process
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, application, str(listening.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,  # its end says that this process has ended
                stdout=self._said,
                stderr=self._said,
            )
        until = time.monotonic() + START
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                said = self._last_line()
                self.close()
                raise ConfigError(f"samplers.openenv.environment: {application} does not start: {said}")
            time.sleep(POLL)

    def close(self) -> None:
        self._process.kill()  # environments keep nothing
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._said.close()

    def _answers(self) -> bool:
        try:
            schema_of(self.url)
        except OSError:
            return False
        return True

    def _last_line(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def schema_of(url: str) -> dict[str, Any]:
    """The JSON schema of the environment's actions. Raises OSError where nothing answers."""
    # No proxy is between this machine and itself; openenv's client asks none for it either.
    proxies: dict[str, str] | None = {} if urlsplit(url).hostname in LOOPBACK else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    with opener.open(f"{url}/schema", timeout=10) as answer:
        schema: dict[str, Any] = json.load(answer)["action"]
        return schema


def main(application: str, descriptor: int) -> None:
    import uvicorn

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    uvicorn.run(application, fd=descriptor, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
