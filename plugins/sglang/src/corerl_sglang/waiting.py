"""Processes that import what they need before they are told what to do.

A process that `multiprocessing` spawns begins to import once it is started, which for SGLang's ranks is after the
server has imported nearly the same: ten seconds and more, one after the other.

A process that waits gets work only if it is as one that starts now would be; otherwise `multiprocessing` starts one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "waits for its work"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Waiting:
    """A process that imports `module` and waits. Killed at the end of this one, if it was given nothing to do."""

    def __init__(self, module: str, prepare: Callable[[], None], *, late: Collection[str]) -> None:
        """Call this in the main thread: the process ends with the thread that starts it. `prepare` is called in the
        process before its work. `late` are the environment variables that nothing reads before the work begins, so
        that they may be set after this."""
        self._module, self._late, self._environment = module, frozenset(late), dict(os.environ)
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_wait, args=(theirs, module, prepare), name=NAME)
        self.process.start()
        theirs.close()  # of which the process has the only one now: it is closed when that has ended
        atexit.register(self.end)  # before multiprocessing's own, which would wait for the process

    def give(self, work: multiprocessing.Process) -> str:
        """Let it do the work of a process that has not been started, in an environment like that of this process now.
        Waits until it has imported. Returns the reason if it must not, or has ended."""
        if (program := os.fsdecode(spawn.get_executable())) != sys.executable:
            return f"{program} is to start the process"  # SGLang binds a rank to cores and memory with numactl
        try:
            changes = self._changes(self._connection.recv())
            if early := sorted(changes.keys() - self._late):
                return f"environment variables have changed that it may have read already: {', '.join(early)}"
            self._connection.send((changes, self._pickled(work)))
        except (EOFError, OSError):
            self.process.join()
            ended = f"it ended with exit code {self.process.exitcode}"
            return f"{ended} while it imported {self._module}, or after that; what it wrote is above"
        atexit.unregister(self.end)
        return ""

    def end(self) -> None:
        """Return once it is gone, with what it held of a GPU."""
        self.process.kill()
        self.process.join()

    def _changes(self, imported: Mapping[str, str]) -> dict[str, str | None]:
        """Environment variables that a process started now would have otherwise (None: would not have) than this one,
        which has `imported` after its imports. One that they set themselves is none."""
        now = {name: os.environ.get(name) for name in {*self._environment, *os.environ}}
        then = self._environment
        return {name: to for name, to in now.items() if to not in (then.get(name), imported.get(name))}

    def _pickled(self, work: multiprocessing.Process) -> bytes:
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            return bytes(ForkingPickler.dumps(work))
        finally:
            set_spawning_popen(None)

    # What multiprocessing asks of a process that is started while its work is pickled, for the files of connections.
    DupFd = popen_spawn_posix._DupFd

    def duplicate_for_child(self, file: int) -> int:
        """The file's number in the process."""
        self._connection.send(None)
        send_handle(self._connection, file, self.process.pid)
        number: int = self._connection.recv()
        return number


def _wait(connection: Connection, module: str, prepare: Callable[[], None]) -> None:
    # With the server, as SGLang does in a rank once that has its work.
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    importlib.import_module(module)
    connection.send(dict(os.environ))
    while (told := connection.recv()) is None:
        connection.send(recv_handle(connection))
    changes, pickled = told
    set_environment(changes)
    prepare()
    work, this = pickle.loads(pickled), multiprocessing.current_process()
    this.name, this.daemon = work.name, work.daemon
    work.run()


def lend(waiting: list[Waiting], user: ModuleType, target: str) -> None:
    """Have the module `user`, which knows `multiprocessing` as `mp`, take processes that wait for work that is called
    `target`, as long as there are any."""

    def process(*args: Any, **kwargs: Any) -> multiprocessing.Process:
        work = multiprocessing.Process(*args, **kwargs)
        if waiting and getattr(kwargs.get("target"), "__name__", "") == target:
            work._Popen = partial(_started, waiting.pop())  # type: ignore[method-assign]
        return work

    user.mp = SimpleNamespace(**{**vars(multiprocessing), "Process": process})  # type: ignore[attr-defined]


def _started(waiting: Waiting, work: Any) -> Any:
    """What `work.start` asks for the handle of the running process."""
    del work._Popen  # it is pickled
    if not (refused := waiting.give(work)):
        return waiting.process._popen  # type: ignore[attr-defined]
    line = f"corerl: process {waiting.process.pid}, which was to be {work.name}, is not used: {refused}"
    print(f"{line}; SGLang starts another, which imports now", file=sys.stderr, flush=True)
    waiting.end()
    return work._Popen(work)


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set variables, or remove those whose value is None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """As `set_environment`, within the context."""
    before = {name: os.environ.get(name) for name in values}
    set_environment(values)
    try:
        yield
    finally:
        set_environment(before)
