"""Host one object of a plain class in its own process; exceptions of its methods come back as data."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from attrs import frozen

from corerl.cluster.forks import Forks, end_with_parent
from corerl.cluster.heartbeat import ASIDE, Heartbeat, Recorder
from corerl.cluster.nodes import interface_of, this_node
from corerl.config.options import GLOO_INTERFACE, READ_AT_START
from corerl.errors import CorerlError, HookFailed, PluginError
from corerl.imports import uncollected
from corerl.messages import one_line
from corerl.plugin.events import Span

THREADS = "OMP_NUM_THREADS"
# What Ray adds to the niceness of its workers: 15 by default, so that other programs would starve a run while its
# driver waits.
NICENESS = "RAY_worker_niceness"
LOOPBACK = "127.0.0.1"


@frozen
class CallResult:
    """The result of a call: a value, or an error that survives pickling."""

    value: Any = None
    error: CorerlError | None = None
    ended: float = 0.0  # time.time() in the process that ran it, like `started`
    started: float = 0.0
    method: str = ""
    phase: str = ""  # of startup that the process was in after the call; "" once it has started
    lane: int = 0  # above 0 for calls that run while others do in the process
    spans: tuple[Span, ...] = ()  # of an object that records them
    waits: tuple[Span, ...] = ()  # in collectives, if the process is traced


def portable(error: BaseException, where: str, failure: type[CorerlError] = HookFailed) -> CorerlError:
    """Return `error` itself if it is one of ours, otherwise a `failure` that describes it; with the traceback as text.

    A plugin's subclass of our errors becomes its nearest base of ours, since it may be unknown outside or not unpickle.
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

    The object may have `phase`, the name of its startup phase; `counts()`, how many parts of a thread's call have
    ended, of how many, by thread; and `trace(recorder)`, called before its first call if the process is `traced`.

    `neighbors` is the number of bundles on this machine. `here` is the driver's working directory, where a user's own
    loss or backend may be. With `bound` the process ends with its parent: Ray's raylet, or the server that has
    forked it, which ends it with the process that the raylet has started.
    """

    def __init__(
        self,
        name: str,
        target: str,
        failure: type[CorerlError] = HookFailed,
        traced: bool = False,
        neighbors: int = 1,
        environment: Mapping[str, str] | None = None,
        here: str = "",
        bound: bool = False,
    ) -> None:
        if here:
            put_last(here)
        os.environ.update(environment or {})
        tempfile.tempdir = None  # Python asks for TMPDIR once
        # Else gloo takes the address that the host's name stands for, which may be one that no other node reaches.
        known = ray.util.get_node_ip_address() if ray.is_initialized() else ""
        if GLOO_INTERFACE not in os.environ and (interface := interface_of(known)):
            os.environ[GLOO_INTERFACE] = interface
        if bound:
            # By itself a worker notices that its raylet has ended only between two imports, or after a minute if GCS
            # has died too, and holds its device so long.
            end_with_parent()
        if THREADS not in started_with():
            # Ray has set it to the CPUs that the process requested, mostly less than one.
            os.environ[THREADS] = str(max(int(os.environ.get(THREADS, "1")), fair_threads(neighbors)))
        self.name = name
        self.target = target
        self.failure = failure
        self.recorder = Recorder(traced=traced)
        self.traced = traced
        self.held: Any = None
        self._starting = "process"  # import, then start, until the object exists

    def listen(self, number: int) -> CallResult:
        """Open a listening socket for code in this process to take over; returns (host, port, file descriptor). Nobody
        can take the port between its choice and its use. Only this machine reaches it if the cluster has no other, else
        the interface by which Ray knows this node."""

        def find() -> tuple[str, int, int]:
            alone = sum(node["Alive"] for node in ray.nodes()) == 1
            host = LOOPBACK if alone else ray.util.get_node_ip_address()
            listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listening.bind((host, 0))
            listening.listen()
            return host, listening.getsockname()[1], listening.detach()

        return self._run(number, "listen", find)

    def construct(self, number: int, *args: Any) -> CallResult:
        def make() -> None:
            module, _, attribute = self.target.partition(":")
            self._starting = "import"
            with uncollected():
                made = getattr(importlib.import_module(module), attribute)
            self._starting = "start"
            try:
                self.held = made(*args)
            except PluginError as error:
                # The driver could load it, but it is missing or different on this node: name the node.
                raise type(error)(f"{self.name} on {this_node()}: {error.message}") from error
            if self.traced and hasattr(self.held, "trace"):
                self.held.trace(self.recorder)

        return self._run(number, "start", make)

    def call(self, number: int, method: str, *args: Any) -> CallResult:
        return self._run(number, method, lambda: getattr(self.held, method)(*args))

    def heartbeat(self) -> Heartbeat:
        """Answered in a thread of its own."""
        counts = self.held.counts() if hasattr(self.held, "counts") else {}
        return self.recorder.heartbeat(self._phase, counts)

    @property
    def _phase(self) -> str:
        return self._starting if self.held is None else getattr(self.held, "phase", "")

    def _run(self, number: int, method: str, work: Callable[[], Any]) -> CallResult:
        """`number` is that of the call in the driver's group."""
        self.recorder.start(number)
        value, failed = None, None
        try:
            value = work()
        except (Exception, SystemExit) as error:  # the latter would end the process without a word of why
            failed = portable(error, f"{self.name}: {method}", self.failure)
        finally:
            record, ended = self.recorder.end()
        return CallResult(
            value=value,
            error=failed,
            ended=ended,
            started=record.started,
            method=method,
            phase=self._phase,
            lane=record.lane,
            spans=tuple(record.spans),
            waits=tuple(record.waits),
        )


def started_with() -> Mapping[str, str]:
    """The environment variables this process started with (from its `environment`, the machine's Ray, or Ray's parent),
    without those set since. Of a forked worker they are its server's, which has those of this process, or it would not
    have forked it."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)  # not Linux: cannot tell
    variables = (entry.decode(errors="replace").partition("=") for entry in entries)
    return {name: value for name, _, value in variables}


def put_last(directory: str) -> None:
    """Let modules in `directory` be found, but not in the place of installed ones. What PYTHONPATH names stays where it
    is."""
    if directory not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.path[:] = [*(path for path in sys.path if path not in ("", directory)), directory]


def cores() -> int:
    """How many cores this process may use, within its container's CPU quota."""
    own = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return own  # not in a container, or cgroups v1
    return own if quota == "max" else max(1, min(own, int(quota) // int(period)))


def fair_threads(neighbors: int) -> int:
    """Half of a bundle's part of the usable cores: a rank and an engine may share a bundle, and what a machine counts
    as two cores is often one."""
    return max(1, cores() // (2 * neighbors))


def spawn(
    name: str,
    target: str,
    *,
    options: dict[str, object],
    neighbors: int,
    environment: dict[str, str],
    failure: type[CorerlError] = HookFailed,
    traced: bool = False,
    forks: Forks | None = None,
) -> Any:
    """Start a process with `environment` set before it imports `target`, forked if `forks` can; returns its actor
    handle at once.

    Only what is read earlier goes through Ray's runtime environment, which Ray writes to its logs.
    """
    early = {variable: value for variable, value in environment.items() if READ_AT_START.match(variable)}
    early[NICENESS] = "0"
    late = {variable: value for variable, value in environment.items() if variable not in early}
    runtime: dict[str, Any] = {"env_vars": early}
    if forks is not None and (command := forks.command(environment)):
        runtime["py_executable"] = command
    # With a concurrency group, all calls run in threads of their groups, none in the process's main thread.
    groups: dict[str, Any] = {"concurrency_groups": {ASIDE: 1}}
    actor = ray.remote(**groups)(Process)
    return actor.options(max_restarts=0, max_task_retries=0, runtime_env=runtime, **options).remote(
        name, target, failure, traced, neighbors, late, os.getcwd(), True
    )
