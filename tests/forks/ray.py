"""One Ray for all runs of a test process, whose workers are forked instead of started."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from attrs import frozen
from ray._private import ray_constants

from tests.forks.client import ROOT, Forked, connect, kill_session
from tests.machine import paced, wait_for_memory

WORKER = Path(__file__).with_name("ray_worker.py")
CPUS = 64  # bundles are reserved, not used: runs ask for one a process
STORE = 200 * 2**20  # bytes
GIB = 1.0  # of memory, for its own processes
ENDS_WITHIN = paced(30.0)  # seconds
HEAD = """
import sys
import ray
from tests.forks.ray import CPUS, STORE, fork_workers
fork_workers()
ray._private.node.Node.start_log_monitor = lambda self: None  # it looks at all logs of all runs all the time
settings = {"prestart_worker_first_driver": False}
node = ray.init(
    address="local", num_cpus=CPUS, object_store_memory=STORE, include_dashboard=False, log_to_driver=False,
    logging_level="ERROR", _system_config=settings,
)
print(node.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


_open = contextlib.ExitStack()


@functools.cache
def shared() -> Head:
    """This test process's Ray, started by the first who asks, for all runs in turn; `close` ends it."""
    return _open.enter_context(head())


def close() -> None:
    _open.close()


@frozen
class Head:
    """A Ray that runs."""

    address: str
    session: int  # of its processes


@contextlib.contextmanager
def head() -> Iterator[Head]:
    """Start Ray in a session of its own."""
    wait_for_memory(GIB, "Ray")
    reads, writes = os.pipe()
    reads_out, tells = os.pipe()
    with open(reads, "rb") as stdin, open(writes, "wb") as end, open(reads_out) as out, open(tells, "wb") as stdout:
        own = environment(PYTHONPATH=str(ROOT))
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stdout}
        process = Forked([sys.executable], HEAD, environment=own, directory=ROOT, **streams)
        stdout.close()
        lines = []
        try:
            for line in out:
                lines.append(line)
                if line.strip().rpartition(":")[2].isdigit():
                    break
            else:
                raise AssertionError(f"Ray did not start:\n{''.join(lines)}")
            yield Head(lines[-1].strip(), process.pid)
            end.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_WITHIN)
        finally:
            kill_session(process.pid)
            process.wait()


def environment(**more: str) -> dict[str, str]:
    """Of a process of a test: one thread, and no end of it by Ray where memory is short, which tests wait for."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0", **more}


def fork_workers() -> None:
    """Have the Ray that this process starts start its workers by `ray_worker.py`.

    Ray joins the name of its own file to the directory that has it, which an absolute path replaces (read in 2.60).
    """
    connect().close()  # `ray_worker.py` takes the server to be there
    ray_constants.SETUP_WORKER_FILENAME = str(WORKER)


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Where this process would start Ray on this machine inside the block, it joins the one at `address`, whose workers
    are forked as it is."""
    init = ray.init

    def joining(**options: Any) -> Any:
        if options["address"] != "local":
            return init(**options)
        asked = {name: options[name] for name in ("log_to_driver", "logging_level", "namespace")}
        return init(address=address, **asked)

    ray.init = joining
    try:
        with without_fork_server():
            yield
    finally:
        ray.init = init


@contextlib.contextmanager
def without_fork_server() -> Iterator[None]:
    """Runs of this process start none of their own inside the block."""
    from corerl.cluster import forks

    fork_server = forks.fork_server
    forks.fork_server = lambda *_: contextlib.nullcontext()
    try:
        yield
    finally:
        forks.fork_server = fork_server
