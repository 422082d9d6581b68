"""The page's server, in a thread of its own."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import uvicorn

from corerl.errors import ConfigError
from corerl_page.app import app
from corerl_page.runs import runs_of
from corerl_page.spec import PORTS

LOOPBACK = "127.0.0.1"


class Server:
    """Listens from its construction on. Raises ConfigError if it cannot."""

    def __init__(
        self, run_dirs: Sequence[Path], *, address: str = LOOPBACK, port: int = 0, hosts: Collection[str] = ()
    ) -> None:
        key, self.runs = secrets.token_urlsafe(24), runs_of(list(run_dirs))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if port not in PORTS:
            raise ConfigError(
                f"cannot listen on port {port}, expected one of {PORTS[0]} to {PORTS[-1]}; 0 is a free one"
            )
        try:
            self._socket = socket.create_server((address, port), family=family)
        except OSError as error:
            why = str(error.strerror).partition(" (while")[0]  # Python adds what this line begins with
            raise ConfigError(
                f"cannot listen on {address} port {port}: {why}; choose another address or port (0: a free one)"
            ) from error
        own = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
        host = f"[{own}]" if ":" in own else own
        # What follows # stays in the browser: neither logs nor other sites get the key.
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/#key={key}"
        self._http = uvicorn.Server(
            uvicorn.Config(
                app(self.runs, key=key, hosts=hosts),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
            )
        )
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until `stop`, or an interrupt."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def stop(self) -> None:
        self._http.should_exit = self._http.force_exit = True
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            self._http.run(sockets=[self._socket])
        finally:
            self._socket.close()
