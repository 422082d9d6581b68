"""What Ray starts in place of its own `setup_worker.py`: it has the worker forked by the server of `tests.forks`, and
ends with it. Imports next to nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    arguments = sys.argv[1:]
    context = next((each[len(CONTEXT) :] for each in arguments if each.startswith(CONTEXT)), "") or "{}"
    rest = [each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))]
    wanted = json.loads(context)
    environment = dict(os.environ)
    for name, value in (wanted.pop("env_vars", None) or {}).items():
        environment[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    usual = wanted.pop("py_executable", None) or sys.executable
    if usual != sys.executable or any(wanted.values()) or environment.get("CORERL_TEST_FORKS", "off") == "off":
        theirs = os.path.join(os.path.dirname(rest[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, theirs, *arguments])
    request = {
        "argv": rest,
        "code": "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')",
        "environment": environment,
        "directory": os.getcwd(),
        "session": False,
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(environment["CORERL_TEST_FORKS"], "socket"))
    body = json.dumps(request).encode()
    socket.send_fds(connection, [struct.pack("!I", len(body))], [0, 1, 2])
    connection.sendall(body)
    lines = connection.makefile("r")
    lines.readline()  # its pid
    os._exit(max(0, os.waitstatus_to_exitcode(int(lines.readline() or 1))))


main()
