"""What the processes of these tests run: a plain class, importable there and here."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray

from corerl.errors import SaveFailed, WrongState
from tests.machine import FOREVER, die_of

WORD_AT_IMPORT = os.environ.get("CORERL_TEST_WORD", "")


def listening() -> list[tuple[str, int]]:
    """The host and port of each TCP socket of this process that listens."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family != socket.AF_UNIX and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(own.getsockname()[:2])
        except OSError:
            continue  # no socket
    return found


class Leaves:
    def __init__(self, code: Any) -> None:
        self.code = code

    def leave(self) -> None:
        raise SystemExit(self.code)


class Loads:
    """Has started once `init` has ended, and meanwhile nothing else runs in its process."""

    def __init__(self, index: int) -> None:
        self.phase = "start"

    def pid(self) -> int:
        return os.getpid()

    def init(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(20_000_000))  # holds the GIL
        self.phase = ""

    def sleep(self) -> None:
        time.sleep(FOREVER)


class Member:
    def __init__(self, index: int) -> None:
        self.index = index
        self.gate = threading.Event()
        self.saved = False
        self.noted: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        """The id of the Ray node that it is on."""
        name: str = ray.get_runtime_context().get_node_id()
        return name

    def save(self, seconds: float) -> None:
        """The first rank's disk is full, others write for so long."""
        if not self.index:
            raise SaveFailed("no space left")
        time.sleep(seconds)
        self.saved = True

    def written(self) -> bool:
        return self.saved

    def sleep(self) -> None:
        time.sleep(FOREVER)

    def niceness(self) -> list[int]:
        """Of each of its threads."""
        return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")]

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    def listens_at(self, port: int) -> str:
        """The local address of this process's socket that listens at the port; "" if there is none."""
        return next((host for host, at in listening() if at == port), "")

    def temporary_directory(self) -> str:
        return tempfile.gettempdir()

    def runtime_environment(self) -> str:
        """As Ray has it, and writes to its logs."""
        return str(ray.get_runtime_context().get_runtime_env_string())

    def word(self) -> str:
        return WORD_AT_IMPORT

    def answer(self, value: Any) -> tuple[int, Any]:
        """The later the smaller its index."""
        time.sleep(0.05 * (2 - self.index))
        return self.index, value

    def note(self, value: Any) -> None:
        self.noted.append(value)

    def notes(self) -> list[Any]:
        return self.noted

    def total(self, values: Any) -> tuple[float, bool]:
        return float(values.sum()), bool(values.flags.writeable)

    def fail_after(self, seconds: Sequence[float], texts: Sequence[str]) -> None:
        time.sleep(seconds[self.index])
        raise ValueError(texts[self.index])

    def die(self, index: int) -> None:
        """Member `index` is killed in the middle of it, the others wait for what never comes."""
        if self.index == index:
            die_of(signal.SIGKILL)
        time.sleep(FOREVER)

    def refuse(self, index: int) -> int:
        """Member `index` is asked for what it cannot do now, and is as it was."""
        if self.index == index:
            raise WrongState("ask later")
        return self.index

    def open(self) -> None:
        self.gate.set()

    def through(self) -> bool:
        """Waits while the gate is closed."""
        return self.gate.wait(timeout=FOREVER)


class Counts:
    """Its calls have ten parts, of which as many end as it is told to."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self.gate = threading.Event()

    def work(self, ended: int) -> int:
        """Returns once the gate is open."""
        self.ended[threading.get_ident()] = ended
        self.gate.wait(timeout=FOREVER)
        del self.ended[threading.get_ident()]
        return ended

    def open(self) -> None:
        self.gate.set()

    def counts(self) -> dict[int, tuple[int, int]]:
        return {thread: (ended, 10) for thread, ended in list(self.ended.items())}


class Shows:
    """In a traced process it shows what it does."""

    def trace(self, span: Callable[[str], AbstractContextManager[None]]) -> None:
        self.span = span

    def work(self, times: int) -> int:
        for each in range(times):
            with self.span(f"part {each}"):
                time.sleep(0.001)
        return times

    def fail(self) -> None:
        with self.span("in vain"):
            raise WrongState("ask later")
