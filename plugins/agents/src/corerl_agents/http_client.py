"""Ask an episode's server from another process."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any
from urllib.parse import SplitResult, urlsplit


class HttpClient:
    """As `ChatServer.ask`, by HTTP; connections stay open and are used again. Any thread may use it."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[http.client.HTTPConnection]] = defaultdict(list)  # by host and port

    def ask(self, base_url: str, body: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """What a POST of this body to `base_url`/chat/completions is answered. Whoever cancels the future is a client
        that has gone."""
        content, answer = json.dumps(body), Future[dict[str, Any]]()
        # A thread of its own: as many may wait as there are episodes.
        threading.Thread(target=self._ask, args=(urlsplit(base_url), content, answer), daemon=True).start()
        return answer

    def _ask(self, url: SplitResult, content: str, answer: Future[dict[str, Any]]) -> None:
        idle = self._idle[url.netloc]
        try:
            connection = idle.pop()
        except IndexError:
            connection = http.client.HTTPConnection(url.netloc)
        try:
            if connection.sock is None:
                connection.connect()
            answer.add_done_callback(functools.partial(_hang_up_if_cancelled, connection))
            connection.request("POST", f"{url.path}/chat/completions", content)
            answered = json.loads(connection.getresponse().read())
        except Exception as error:
            connection.close()
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                answer.set_exception(error)
            return
        try:
            answer.set_result(answered)
        except InvalidStateError:  # it was cancelled as the answer came
            connection.close()
        else:
            idle.append(connection)


def _hang_up_if_cancelled(connection: http.client.HTTPConnection, answer: Future[Any]) -> None:
    if answer.cancelled() and (sock := connection.sock) is not None:
        with contextlib.suppress(OSError):  # the server was first
            sock.shutdown(socket.SHUT_RDWR)
