"""A server in a thread of its own, while the thread that runs it drives the group."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from corerl.rollout import EventLoop
from corerl_tinker.app import app
from corerl_tinker.options import ServeOptions
from corerl_tinker.service import Service

if TYPE_CHECKING:
    from corerl_tinker.training import ServedPolicy

IDLE_SECONDS = 24 * 3600  # a server that closes a connection earlier may do so as a client sends its next request


class Server:
    def __init__(
        self,
        policy: ServedPolicy,
        options: ServeOptions,
        *,
        key: str,
        listening: socket.socket,
        notify: Callable[[str], None],
    ) -> None:
        self._loop, self._socket = EventLoop("server"), listening
        self.service = Service(policy, options, self._loop, notify=notify)
        self._http = uvicorn.Server(
            uvicorn.Config(
                app(self.service, key=key, hosts=options.hosts),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",  # `notify` says what matters
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
            )
        )

    def run(self) -> None:
        """Serve until `stop`, or until this thread is interrupted; it makes all calls of the policy but `draw`."""
        try:
            self._loop.run(self._serve())
        finally:
            self._loop.close()

    def stop(self) -> None:
        """End `run`, from any thread; clients that wait are cut off."""
        self._http.should_exit = self._http.force_exit = True

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self.service.work())
            await self._http.serve(sockets=[self._socket])
            working.cancel()
