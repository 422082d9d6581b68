"""One object of a plain class in a process of its own; what its methods raise comes back as data."""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import ray
from attrs import evolve, frozen

from corerl.cluster.nodes import this_node
from corerl.cluster.spans import Recorder
from corerl.cluster.watchdog import Status, frame_of, stand
from corerl.errors import CorerlError, HookFailed, PluginError
from corerl.imports import uncollected
from corerl.messages import one_line
from corerl.plugin.events import Span

STATUS = "status"  # the concurrency group that answers while all other threads work
THREADS = "OMP_NUM_THREADS"


@frozen
class Outcome:
    """What a call gave: a value, or an error that is known to survive pickling."""

    value: Any = None
    error: CorerlError | None = None
    ended: float = 0.0  # time.time() in the process that ran it, as is `started`
    started: float = 0.0
    method: str = ""
    # Of a process that is traced:
    lane: int = 0  # more than 0 where the process runs several calls at the same time
    spans: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()  # in collectives


def portable(error: BaseException, where: str, failure: type[CorerlError] = HookFailed) -> CorerlError:
    """`error` itself where it is one of ours; else a `failure` that tells of it. Either way with its traceback as text.

    What a plugin derives from ours becomes the nearest of ours: its class need not be known outside, nor unpickle.
    """
    failed: CorerlError
    if isinstance(error, CorerlError):
        ours = next(kind for kind in type(error).__mro__ if kind.__module__ == CorerlError.__module__)
        failed = error if type(error) is ours else ours(str(error))
        failed.details = error.details
    else:
        failed = failure(f"{where}: {one_line(error)}")
    failed.details = failed.details or f"{where}\n" + "".join(traceback.format_exception(error))
    return failed


class Process:
    """The actor. `target` is "module:Class"; the class is imported here, after the environment is set.

    What the watchdog asks for comes from the object where it has that: `phase`, a word for where its beginning stands,
    and `collectives()`, how many it has begun by process group. Where the process is `traced`, the object's `trace`, if
    it has one, is given the recorder before its first call. It is on one of `neighbours` bundles of its machine.
    """

    def __init__(
        self,
        name: str,
        target: str,
        failure: type[CorerlError] = HookFailed,
        traced: bool = False,
        neighbours: int = 1,
    ) -> None:
        if THREADS not in started_with():
            # Ray has set it to the CPUs that the process asked for, which for most is less than one.
            os.environ[THREADS] = str(max(int(os.environ.get(THREADS, "1")), fair_threads(neighbours)))
        self.name = name
        self.target = target
        self.failure = failure
        self.recorder = Recorder() if traced else None
        self.held: Any = None
        self._beginning = ""  # import, then start, until there is an object
        self._working: dict[int, str] = {}  # thread -> method, the first that was called first

    def listen(self) -> Outcome:
        """(host, port, file descriptor) of a socket that listens already, for code in this process to take over: so no
        one can take the port between its choice and its use."""

        def find() -> tuple[str, int, int]:
            listening = socket.socket()
            listening.bind(("", 0))
            listening.listen()
            return ray.util.get_node_ip_address(), listening.getsockname()[1], listening.detach()

        return self._outcome("listen", find)

    def construct(self, *args: Any) -> Outcome:
        def make() -> None:
            module, _, attribute = self.target.partition(":")
            self._beginning = "import"
            with uncollected():
                made = getattr(importlib.import_module(module), attribute)
            self._beginning = "start"
            try:
                self.held = made(*args)
            except PluginError as error:
                # What the driver could load is missing, or another one, on this node: which one is that?
                raise type(error)(f"{self.name} on {this_node()}: {error.message}") from error
            if self.recorder is not None and hasattr(self.held, "trace"):
                self.held.trace(self.recorder)

        return self._outcome("start", make)

    def call(self, method: str, *args: Any) -> Outcome:
        return self._outcome(method, lambda: getattr(self.held, method)(*args))

    def status(self) -> Status:
        """Where the call stands that is under way; answered in a thread of its own."""
        frame = frame_of(next(iter(list(self._working)), 0))
        place, waits, stack = stand(frame) if frame is not None else ("", False, 0)
        phase = self._beginning if self.held is None else getattr(self.held, "phase", "")
        collectives = self.held.collectives() if hasattr(self.held, "collectives") else {}
        return Status(phase=phase, place=place, waits=waits, collectives=collectives, stack=stack)

    def _outcome(self, method: str, work: Any) -> Outcome:
        self._working[threading.get_ident()] = method
        if self.recorder is not None:
            self.recorder.begin()
        started, value, failed = time.time(), None, None
        try:
            value = work()
        except Exception as error:
            failed = portable(error, f"{self.name}: {method}", self.failure)
        finally:
            del self._working[threading.get_ident()]
            ended = time.time()
            call = self.recorder.end(ended) if self.recorder is not None else None
        outcome = Outcome(value=value, error=failed, ended=ended, started=started, method=method)
        if call is None:
            return outcome
        return evolve(outcome, lane=call.lane, spans=tuple(call.spans), waits=tuple(call.waits))


def started_with() -> set[str]:
    """The variables that this process began with: of its `environment`, of the machine's Ray, or of whoever started
    that. What is set since is not among them."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return set(os.environ)  # no Linux, and no telling
    return {entry.partition(b"=")[0].decode() for entry in entries}


def fair_threads(neighbours: int) -> int:
    """Half of a bundle's share of the cores that this process may use: a rank and an engine may be on one bundle, and
    what a machine counts as two cores is often one."""
    return max(1, cores() // (2 * neighbours))


def cores() -> int:
    """How many cores this process may use, and its container has time for."""
    own = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return own  # in no container, or under the first version of cgroups
    return own if quota == "max" else max(1, min(own, int(quota) // int(period)))


def spawn(
    name: str,
    target: str,
    *,
    options: dict[str, object],
    neighbours: int,
    environment: dict[str, str],
    failure: type[CorerlError] = HookFailed,
    traced: bool = False,
) -> Any:
    """Start a process with `environment` set before it imports anything; returns its actor handle at once."""
    # With a concurrency group besides, all calls run in threads of their groups and none in the process's main thread.
    groups: dict[str, Any] = {"concurrency_groups": {STATUS: 1}}
    actor = ray.remote(**groups)(Process)
    return actor.options(max_restarts=0, max_task_retries=0, runtime_env={"env_vars": environment}, **options).remote(
        name, target, failure, traced, neighbours
    )
