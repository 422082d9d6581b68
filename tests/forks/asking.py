"""Be a process that the server of `tests.forks` forks, as whoever started this one sees it. Imports next to nothing."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

# Where the packages of this interpreter may not be found.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "corerl", "cluster"))
from forks import ask, request_of

del sys.path[0]


def become(argv: list[str], code: str, environment: dict[str, str]) -> NoReturn:
    """Have it forked with this process's streams and directory; `code` is what it runs."""
    request = {**request_of(argv), "environment": environment, "code": code, "session": os.getsid(0)}
    ask(os.path.join(environment["CORERL_TEST_FORKS"], "socket"), request, patience=None)
    sys.exit("the tests' fork server is gone")
