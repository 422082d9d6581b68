"""A process that serves one connection: it is killed with all that it has started, and ends with the driver."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class ServingProcess:
    """Runs `serve(connection, *args)` in a new process; this end of the connection closes when the process ends."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        """Starts immediately, and does not wait for it. `serve` and `args` must be picklable."""
        # A fork of a process with threads (Ray's, torch's) may hang; spawned ones also get the driver's sys.path.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(serve, theirs, *args))
        # A Ctrl-C is for the driver: the process ignores it as soon as it can.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # now held by the process alone: the connection closes when it ends

    def kill(self) -> None:
        """Kill the process, from any thread, and what it has started; a thread that waits for it notices."""
        pid = self.process.pid
        assert pid is not None  # it was started
        started = descendants(pid)
        self.process.kill()  # first, so that it starts no others
        _kill_pids(*started, -pid)

    def wait(self, timeout: float) -> int | None:
        """The exit status of the process, or None if it has not ended after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self.process.join(timeout)
        # multiprocessing takes the status of every child whenever any thread starts another one, and tells a thread
        # that asks in between that there is none.
        while (code := self.process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code

    def end(self) -> None:
        """Kill the process, and wait for it."""
        self.kill()
        self.process.join()
        self.connection.close()


def exit_status(exitcode: int) -> str:
    """How a process has ended, as a message says it: the name of the signal, or its status."""
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"


def descendants(*pids: int) -> Sequence[int]:
    """The processes that these have started, and so on, that run now; parents come before their children."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(file.read_bytes().rpartition(b")")[2].split()[1])
            children[parent].append(int(file.parent.name))
    found = list(pids)
    for pid in found:  # which grows
        found += children[pid]
    return found[len(pids) :]


def _kill_pids(*pids: int) -> None:
    """Kill these processes, and the group of each one that is negative."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
            os.kill(pid, signal.SIGKILL)


# ---- in the process --------------------------------------------------------------------------------------------------


def _serve(serve: Callable[..., None], connection: Connection, *args: Any) -> None:
    # A child left running by user code would hold it open, and the end of this process would not be noticed.
    os.set_inheritable(connection.fileno(), False)
    os.register_at_fork(after_in_child=connection.close)
    # Leave the driver's process group: Ctrl-C and job-wide signals are for the driver to handle.
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which drops one that came before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_driver, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the driver is gone
        serve(connection, *args)


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        # User code may run forever, and nobody waits for it.
        _kill_pids(*descendants(os.getpid()), -os.getpid())
        os._exit(1)  # where it has put itself into another group
