"""Ranks of `corerl_testing.pool.RankPool` that the session's fork server forks: it has imported the backends, so that
they need not. As a plugin of pytest, `-p tests.forks.ranks`, for all pools of a process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import process
from multiprocessing.connection import Connection
from typing import Any

from corerl_testing import pool
from tests.forks.client import Forked

# Its stream of input is the pipe. Tensors that are sent through it are fetched with the key.
CODE = """
import multiprocessing, os, sys
from multiprocessing.connection import Connection
sys.path[:] = {path!r}
multiprocessing.current_process().authkey = {key!r}
from {module} import {name}
{name}(*{arguments!r}, Connection(os.dup(0)))
"""


class Rank:
    """What a pool uses of `multiprocessing.Process`, whose last argument is the pipe."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        assert daemon  # it is killed when this process has gone
        self._target = target
        *self._arguments, self._pipe = args
        self._forked: Forked | None = None

    def start(self) -> None:
        code = CODE.format(
            path=sys.path,
            key=bytes(multiprocessing.current_process().authkey),
            module=self._target.__module__,
            name=self._target.__qualname__,
            arguments=self._arguments,
        )
        with open(1, "wb", closefd=False) as stdout, open(2, "wb", closefd=False) as stderr:
            self._forked = Forked(
                ["rank"],
                code,
                environment=os.environ,
                stdin=self._pipe,
                stdout=stdout,
                stderr=stderr,
                directory=process.ORIGINAL_DIR,  # type: ignore[attr-defined]
                leads=False,
            )

    def kill(self) -> None:
        assert self._forked is not None
        self._forked.kill()

    def join(self, timeout: float | None = None) -> None:
        assert self._forked is not None
        try:
            self._forked.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    @property
    def exitcode(self) -> int | None:
        assert self._forked is not None
        return self._forked.poll()


class Context:
    """What a pool uses of a multiprocessing context."""

    Process = Rank

    @staticmethod
    def Pipe() -> tuple[Connection, Connection]:
        return multiprocessing.Pipe()


def pytest_configure() -> None:
    pool.fork_server = Context
