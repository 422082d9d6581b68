"""Watch the processes of the Ray that was started here: if one dies, interrupt the main thread, and say which one it
was and where its log is."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from attrs import define, field, frozen
from ray._private import ray_constants

from corerl.cluster import with_parent, witness
from corerl.descendants import descendants
from corerl.messages import note

INTERRUPT = signal.SIGRTMAX if hasattr(signal, "SIGRTMAX") else signal.SIGTERM  # one that nobody else sends
AGAIN_SECONDS = 1.0  # between two interruptions: the first may hit a place where Python drops exceptions
SEEN_SECONDS = 1.0  # for a death to be seen here after its consequences: the kernel closes a process's sockets first
WITNESS_SECONDS = 5.0  # for a process that looks on to end
GCS, RAYLET = ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET
# Ray ends without any of these. Its agents are children of raylet, known by their script or, later, by their title.
LOGS = {GCS: "gcs_server.out", RAYLET: "raylet.out"}
AGENTS = {
    "dashboard agent": (("dashboard/agent.py", "ray::DashboardAgent"), "dashboard_agent.log"),
    "runtime-env agent": (("runtime_env/agent/main.py", "ray::RuntimeEnvAgent"), "runtime_env_agent.log"),
}


@frozen
class Service:
    """One of Ray's processes."""

    name: str
    log: Path
    handle: int  # a pidfd: no other process can take its place

    @property
    def death(self) -> str:
        return (
            f"Ray's {self.name} has died; unless someone killed it, see the machine's log (dmesg: out of memory?) and "
            f"its own ({self.log})"
        )


@define(eq=False)
class Watch:
    """The services of one session. `armed`: whether a death interrupts the main thread, if the session is in it."""

    services: list[Service]
    died: Service | None = None
    armed: bool = True
    _seen: threading.Event = field(factory=threading.Event)
    _closed: threading.Event = field(factory=threading.Event)
    _wakes: tuple[int, int] = field(factory=os.pipe)

    def run(self, interrupts: bool) -> None:
        """Wait for the first death, without polling; then interrupt until that is heard."""
        waiting = select.poll()
        for descriptor in (self._wakes[0], *(service.handle for service in self.services)):
            waiting.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if self._wakes[0] in ready:
            return
        if not any(service.handle in ready and service.name in LOGS for service in self.services):
            time.sleep(witness.TOGETHER_SECONDS)
            ready |= {descriptor for descriptor, _ in waiting.poll(0)}
        self.died = next(service for service in self.services if service.handle in ready)
        self._seen.set()
        while interrupts and not self._closed.is_set():
            if self.armed:
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
            self._closed.wait(AGAIN_SECONDS)

    def interrupt(self, *_: object) -> None:
        if self.armed and self.died is not None:
            raise KeyboardInterrupt  # as which Ray's calls end at any signal whose handler raises

    def seen(self, within: float) -> Service | None:
        """The service that has died, or does so `within` seconds."""
        self._seen.wait(within if self.services else 0.0)
        return self.died

    def close(self, watcher: threading.Thread) -> None:
        self.armed = False
        self._closed.set()
        os.write(self._wakes[1], b".")
        watcher.join()

    def free(self) -> None:
        for descriptor in (*self._wakes, *(service.handle for service in self.services)):
            os.close(descriptor)


_watch: Watch | None = None  # of this process's session: Ray has one at a time


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch the services of the Ray that this process has started, which is none where it has joined a cluster, or the
    system has no pidfd. The caller reads from the Watch, also after the block, what has died."""
    global _watch
    in_main = threading.current_thread() is threading.main_thread()
    watch = Watch(list(_services()))
    watcher = threading.Thread(target=watch.run, args=(in_main,), name="corerl-ray", daemon=True)
    with _witnessed(watch.services):
        before = signal.signal(INTERRUPT, watch.interrupt) if in_main and watch.services else None
        _watch = watch
        watcher.start()
        try:
            yield watch
        finally:
            watch.close(watcher)
            if in_main and watch.services:
                signal.signal(INTERRUPT, before or signal.SIG_DFL)
            if not gcs_lives():
                end_raylet()
            _watch = None
            watch.free()


@contextlib.contextmanager
def _witnessed(services: Sequence[Service]) -> Iterator[None]:
    """If one of them dies in the block and this process ends for it without a word, another process says the word."""
    if not services:
        yield
        return
    # GCS ends with this process, so it is the cause only where nothing else has ended.
    by_cause = sorted(services, key=lambda service: service.name == GCS)
    lines = [f"{service.handle}:corerl: error: {service.death}" for service in by_cause]
    try:
        looks_on = subprocess.Popen(
            [sys.executable, "-IS", witness.__file__, *lines],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=[service.handle for service in services],
            process_group=0,  # Ctrl-C is for this process
        )
    except OSError as error:
        note(f"nobody will tell of it if Ray ends this process, as no other can be started: {error}")
        yield
        return
    assert looks_on.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # it was killed
            looks_on.stdin.write(b".")
        looks_on.stdin.close()
        try:
            looks_on.wait(WITNESS_SECONDS)
        except subprocess.TimeoutExpired:
            looks_on.kill()
            looks_on.wait()


def arm(armed: bool) -> None:
    """Let a death of Ray's interrupt the main thread, or not: for what must not be cut short."""
    if _watch is not None:
        _watch.armed = armed


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Let a death of Ray's interrupt the main thread only after the block: what it asks of several processes, it asks
    of all."""
    if _watch is None or not _watch.armed or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch, _watch.armed = _watch, False
    try:
        yield
    finally:
        watch.armed = True
    watch.interrupt()  # at once, if one has died meanwhile


def died() -> Service | None:
    """Which of Ray's processes has died, if this process has started them."""
    return _watch.died if _watch is not None else None


def gcs_lives() -> bool:
    """Whether Ray's own calls still answer. Without GCS, they wait for a minute, and then Ray ends the process."""
    dead = died()
    return dead is None or dead.name != GCS


def ranks_live() -> bool:
    """Whether ranks and engines still answer: they do without GCS, for a minute, but not without raylet."""
    dead = died()
    return dead is None or dead.name != RAYLET


def logs() -> str:
    """The directory of the session's logs, on whichever of its machines."""
    if (node := _node()) is not None:
        return str(node.get_logs_dir_path())
    return os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs")


def end_raylet() -> None:
    """Kill raylet and all that it has started, which it would not end without GCS."""
    node = _node()
    if node is None or RAYLET not in node.all_processes:
        return
    raylet = node.all_processes[RAYLET][0].process
    for pid in (raylet.pid, *descendants(raylet.pid)):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)


def _node() -> Any:
    """Ray's own record of the processes that it has started here; None outside of a session."""
    return ray._private.worker._global_node


def _services() -> Iterator[Service]:
    node = _node()
    if node is None or not node.is_head() or RAYLET not in node.all_processes or not hasattr(os, "pidfd_open"):
        return
    where = Path(logs())
    for name, log in LOGS.items():
        yield Service(name, where / log, os.pidfd_open(node.all_processes[name][0].process.pid))
    for pid in descendants(node.all_processes[RAYLET][0].process.pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            for name, (marks, log) in AGENTS.items():
                if any(mark in line for mark in marks) and with_parent.__file__ not in line:
                    yield Service(name, where / log, os.pidfd_open(pid))
