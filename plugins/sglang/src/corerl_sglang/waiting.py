"""Processes that import what they need before they are told what to do.

A process that `multiprocessing` spawns begins to import once it is started, which for SGLang's ranks is after the
server has imported nearly the same: ten seconds and more, one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

NAME = "waits for its work"


class Waiting:
    """A process that imports `module` and waits. Killed at the end of this one, if it was given nothing to do."""

    def __init__(self, module: str, prepare: Callable[[], None]) -> None:
        """`prepare` is called in the process before its work."""
        receive, self._send = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_wait, args=(receive, module, prepare), name=NAME)
        self.process.start()
        receive.close()
        atexit.register(self.end)  # before multiprocessing's own, which would wait for the process

    def give(self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Let it call `target`, in an environment like that of this process now."""
        atexit.unregister(self.end)
        self._send.send((dict(os.environ), target, args, kwargs))

    def end(self) -> None:
        atexit.unregister(self.end)
        self.process.kill()


def _wait(receive: Connection, module: str, prepare: Callable[[], None]) -> None:
    importlib.import_module(module)
    with contextlib.suppress(EOFError):  # this process's parent has ended
        environment, target, args, kwargs = receive.recv()
        os.environ.clear()
        os.environ.update(environment)
        prepare()
        target(*args, **kwargs)


class Taken:
    """Stands for the `multiprocessing.Process` of some work, and gives it to a process that waits."""

    def __init__(
        self, waiting: Waiting, target: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> None:
        self._waiting, self._work = waiting, (target, args, kwargs or {})
        self._process: Any = waiting.process

    def start(self) -> None:
        if os.fsdecode(spawn.get_executable()) == sys.executable:
            self._waiting.give(*self._work)
            return
        # A program that binds the process to cores and memory (SGLang has numactl do that) starts it.
        self._waiting.end()
        target, args, kwargs = self._work
        self._process = multiprocessing.get_context("spawn").Process(target=target, args=args, kwargs=kwargs)
        self._process.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def lend(waiting: list[Waiting], user: ModuleType, target: str) -> None:
    """Have the module `user`, which knows `multiprocessing` as `mp`, take processes that wait for work that is called
    `target`, as long as there are any."""

    def process(*args: Any, **kwargs: Any) -> Any:
        if waiting and getattr(kwargs.get("target"), "__name__", "") == target:
            return Taken(waiting.pop(), **kwargs)
        return multiprocessing.Process(*args, **kwargs)

    own = ModuleType(multiprocessing.__name__)
    own.__dict__.update({**vars(multiprocessing), "Process": process})
    user.mp = own  # type: ignore[attr-defined]
