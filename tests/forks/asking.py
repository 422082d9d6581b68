"""Be a process that the server of `tests.forks` forks, as whoever started this one sees it. Imports next to nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from typing import NoReturn

SOCKET, WITH_RAY = "socket", "socket-with-ray"  # of the two servers, in their directory
# The second has imported Ray, for drivers whose variables of Ray are these, and for workers that have one more.
RAYS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",  # this and the next as corerl.cluster sets them in any process that imports it
    "RAY_COLOR_PREFIX": "0",
}
WORKERS = {"RAY_worker_niceness": "0"}  # as corerl.cluster sets it for each


def become(
    argv: list[str],
    code: str,
    environment: dict[str, str],
    *,
    descriptors: tuple[int, ...] = (),
    place: str = SOCKET,
) -> NoReturn:
    """Have it forked with this process's streams, directory and these descriptors, hand signals on to it, and end as it
    does. It ends with this process."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(environment["CORERL_TEST_FORKS"], place))
    given = [0, 1, 2, *descriptors]
    request = {"argv": argv, "code": code, "environment": environment, "directory": os.getcwd()}
    body = json.dumps({**request, "descriptors": given, "leads": False}).encode()
    socket.send_fds(connection, [struct.pack("!I", len(body))], given)
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
