"""Ranks of a `RankPool` that the tests' server forks, in place of those of a fork server for each test process, which
would import for seconds what this one has imported."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.forks.client import Forked

# Of tensors, descriptors are sent, to processes that have the same key.
CODE = """
import os
from multiprocessing import current_process
from multiprocessing.connection import Connection
from {module} import {name}
current_process().authkey = {key!r}
{name}(*{arguments!r}, Connection(os.dup(0)))
"""


class Rank:
    """What `RankPool` needs of a `multiprocessing.Process`; the last argument of its function is a connection."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...], daemon: bool) -> None:
        assert daemon  # it ends with this process: the server sees to that
        *arguments, self._pipe = args
        key = bytes(multiprocessing.current_process().authkey)
        self._code = CODE.format(module=target.__module__, name=target.__name__, arguments=arguments, key=key)

    def start(self) -> None:
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with contextlib.ExitStack() as streams:
            out, err = (streams.enter_context(open(os.dup(number), "wb")) for number in (1, 2))
            self._process = Forked(["-c"], self._code, environment=own, stdin=self._pipe, stdout=out, stderr=err)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


class Context:
    """What `RankPool` needs of a context of multiprocessing."""

    Process = Rank

    @staticmethod
    def Pipe() -> tuple[Connection, Connection]:
        return multiprocessing.Pipe()
