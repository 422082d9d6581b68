"""Be a process that the server of `tests.forks` forks, as whoever started this one sees it. Imports next to nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from typing import NoReturn

SOCKET = "socket"  # of the server, in its directory


def become(argv: list[str], code: str, environment: dict[str, str]) -> NoReturn:
    """Have it forked with this process's streams and directory, hand signals on to it, and end as it does. It ends with
    this process."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(environment["CORERL_TEST_FORKS"], SOCKET))
    request = {"argv": argv, "code": code, "environment": environment, "directory": os.getcwd(), "leads": False}
    body = json.dumps(request).encode()
    socket.send_fds(connection, [struct.pack("!I", len(body))], [0, 1, 2])
    connection.sendall(body)
    lines = connection.makefile("r")
    pid = int(lines.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = os.waitstatus_to_exitcode(int(lines.readline() or 1))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
