"""Processes that import what they need before they are told what to do.

A process that `multiprocessing` spawns begins to import once it is started, which for SGLang's ranks is after the
server has imported nearly the same: ten seconds and more, one after the other.

A process that waits gets work only if it is as one that starts now would be; otherwise `multiprocessing` starts one.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import io
import multiprocessing
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from types import ModuleType
from typing import Any

NAME = "waits for its work"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
SECONDS = 10.0  # until the exit status of a process is known whose end of the connection is closed


class Waiting:
    """A process that imports `module` and waits. Killed at the end of this one, if it was given nothing to do."""

    def __init__(self, module: str, prepare: Callable[[], None], *, late: Collection[str]) -> None:
        """Call this in the main thread: the process ends with the thread that starts it. `prepare` is called in the
        process before its work. `late` are the environment variables that nothing reads before the work begins, so
        that they may be set after this."""
        self._module, self._late = module, frozenset(late)
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_wait, args=(theirs, module, prepare), name=NAME)
        self._environment, self._inherited = dict(os.environ), _inherited()
        self.process.start()
        theirs.close()  # of which the process has the only one now: it is closed when that has ended
        atexit.register(self.end)  # before multiprocessing's own, which would wait for the process

    def give(self, work: multiprocessing.Process) -> str:
        """Let it do the work of a process that has not been started, in an environment like that of this process now.
        Waits until it has imported. Returns the reason if it must not, or cannot, and has then done nothing."""
        program = os.fsdecode(spawn.get_executable())
        if program != sys.executable:  # SGLang binds a rank to cores and memory with numactl
            return f"{program} is to start the process"
        if (method := multiprocessing.get_start_method()) != "spawn":
            return f"processes are now started by {method!r}, not by 'spawn'"
        try:
            imported = self._connection.recv()
        except (EOFError, OSError):
            return self._ended()
        now = _inherited()
        if changed := [name for name, value in self._inherited.items() if now[name] != value]:
            return f"{' and '.join(changed)} of this process have changed since it started"
        changes = self._changes(imported)
        if early := sorted(set(changes) - self._late):
            return f"environment variables have changed that it may have read already: {', '.join(early)}"
        target, args, kwargs = work._target, work._args, work._kwargs  # type: ignore[attr-defined]
        try:
            payload, files = _packed((target, args, kwargs))
        except Exception as error:  # whatever an object's own way of being pickled raises
            return f"its work cannot be sent to it ({type(error).__name__}: {error})"
        try:
            self._connection.send((changes, sys.path, work.name, work.daemon, len(files)))
            for file in files:
                send_handle(self._connection, file, self.process.pid)
            self._connection.send_bytes(payload)
        except OSError:
            return self._ended()
        self._connection.close()
        atexit.unregister(self.end)
        return ""

    def end(self) -> None:
        """End it, and return once it is gone, with what it held of a GPU."""
        atexit.unregister(self.end)
        self._connection.close()
        self.process.kill()
        self.process.join()

    def _changes(self, imported: dict[str, str]) -> dict[str, str | None]:
        """Environment variables that a process started now would have otherwise (None: would not have) than this one,
        which has `imported` after its imports. One that they set themselves is none."""
        names = {**self._environment, **imported, **os.environ}
        now = {name: os.environ.get(name) for name in names}
        return {
            name: value
            for name, value in now.items()
            if value != self._environment.get(name) and value != imported.get(name)
        }

    def _ended(self) -> str:
        self.process.join(SECONDS)
        code = self.process.exitcode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with status {code}"
        return f"while it imported {self._module} or waited it {how}; what it wrote is above in {_log()}"


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set variables, or remove those whose value is None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _inherited() -> dict[str, Any]:
    """What a process inherits besides the environment. The stack of its threads is as large as a limit at its start."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {"limits": limits, "cores": os.sched_getaffinity(0), "working directory": os.getcwd()}


def _log() -> str:
    """Where standard error goes to, of this process and those that it starts."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return "standard error"


class _Packer(ForkingPickler):
    """Pickles connections as the numbers of files, which are sent by themselves. (multiprocessing's own way outside of
    a start is a thread and a socket in a directory, which remains where the server is killed.)"""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into)
        self.files: list[int] = []

    def persistent_id(self, obj: Any) -> tuple[int, bool, bool] | None:
        if not isinstance(obj, Connection):
            return None
        self.files.append(obj.fileno())
        return len(self.files) - 1, obj.readable, obj.writable


class _Unpacker(pickle.Unpickler):
    def __init__(self, payload: bytes, files: Sequence[int]) -> None:
        super().__init__(io.BytesIO(payload))
        self._files = files

    def persistent_load(self, pid: Any) -> Connection:
        number, readable, writable = pid
        return Connection(self._files[number], readable, writable)


def _packed(work: object) -> tuple[bytes, list[int]]:
    into = io.BytesIO()
    packer = _Packer(into)
    packer.dump(work)
    return into.getvalue(), packer.files


def _wait(connection: Connection, module: str, prepare: Callable[[], None]) -> None:
    _end_with_parent()
    importlib.import_module(module)
    connection.send(dict(os.environ))
    try:
        changes, path, name, daemon, count = connection.recv()
    except EOFError:  # nothing to do
        return
    files = [recv_handle(connection) for _ in range(count)]
    payload = connection.recv_bytes()
    connection.close()
    set_environment(changes)
    sys.path[:] = path
    this = multiprocessing.current_process()
    this.name, this.daemon = name, daemon
    prepare()
    target, args, kwargs = _Unpacker(payload, files).load()
    target(*args, **kwargs)


def _end_with_parent() -> None:
    """SGLang does the same in a rank, once that has its work."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it had ended before
        os._exit(1)


class Taken(multiprocessing.Process):
    """A process whose start is to give its work to one that waits, if that may have it."""

    def __init__(self, waiting: Waiting, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if kwargs.get("name") is None and len(args) < 3:  # multiprocessing has named it by its class
            self.name = self.name.replace(Taken.__name__, multiprocessing.Process.__name__, 1)
        self._waiting: Waiting | None = waiting

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        """What `start` calls for the handle of the running process."""
        waiting, process_obj._waiting = process_obj._waiting, None  # it is pickled if it is started here
        refused = waiting.give(process_obj)
        if not refused:
            return waiting.process._popen
        line = f"corerl: process {waiting.process.pid}, which was to be {process_obj.name}, is not used: {refused}"
        print(f"{line}; SGLang starts another, which imports now", file=sys.stderr, flush=True)
        waiting.end()
        return multiprocessing.Process._Popen(process_obj)


def lend(waiting: list[Waiting], user: ModuleType, target: str) -> None:
    """Have the module `user`, which knows `multiprocessing` as `mp`, take processes that wait for work that is called
    `target`, as long as there are any."""

    def process(*args: Any, **kwargs: Any) -> multiprocessing.Process:
        work = kwargs.get("target", args[1] if len(args) > 1 else None)
        if waiting and getattr(work, "__name__", "") == target:
            return Taken(waiting.pop(), *args, **kwargs)
        return multiprocessing.Process(*args, **kwargs)

    own = ModuleType(multiprocessing.__name__)
    own.__dict__.update({**vars(multiprocessing), "Process": process})
    user.mp = own  # type: ignore[attr-defined]
