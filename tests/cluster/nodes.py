"""A Ray cluster of several nodes on this machine, for tests that join it: `python nodes.py NODES_JSON`.

Each node is a table of keyword arguments of `ray.cluster_utils.Cluster.add_node`, the first one the head's, and of
`python`: the interpreter that it and its workers run, where that is another one. Prints the address once all are there,
adds a node for each line of its stdin, and prints the address again; ends the cluster when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def cluster(*nodes: dict[str, Any], **environment: str) -> Iterator[str]:
    """Such a cluster in processes of its own, a session of their own too; gives its address."""
    with machines(*nodes, **environment) as found:
        yield found.address


class Machines:
    """Such a cluster, whose nodes come and go."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address = address
        self._process = process

    def add(self, **node: Any) -> None:
        """Returns once it is there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(node), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline().strip() == self.address

    def kill(self, resource: str) -> None:
        """The raylet of the node with a custom resource, whose other processes end with it, and never say a word."""
        (raylet,) = (
            pid
            for pid, line in session(self._process.pid).items()
            if re.search(rf"resource_list=(\S*,)?{resource},", line)
        )
        os.kill(raylet, signal.SIGKILL)


@contextlib.contextmanager
def machines(*nodes: dict[str, Any], **environment: str) -> Iterator[Machines]:
    from tests.forks.client import connect

    connect().close()  # the cluster takes the server to be there
    process = subprocess.Popen(
        [sys.executable, Path(__file__), json.dumps(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            address = process.stdout.readline().strip()
            assert address, "the cluster did not start"
            yield Machines(address, process)
            process.stdin.close()
            process.wait(timeout=120.0)
        finally:
            for pid in session(process.pid):
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)


def session(leader: int) -> dict[int, str]:
    """The processes of a session that run now, with their titles."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == leader and state != "Z":
                found[int(directory.name)] = title_in(directory)
        except OSError:  # it has ended meanwhile
            continue
    return found


def title_in(directory: Path) -> str:
    """Of the process that this is the directory of in /proc."""
    return (directory / "cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace").strip()


def main() -> None:
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    sys.path.append(
        str(Path(__file__).resolve().parents[2])
    )  # of this process alone: nodes look for packages themselves
    from tests.forks.ray import fork_workers

    nodes = Cluster()
    own, as_ray_does = sys.executable, ray_constants.SETUP_WORKER_FILENAME
    settings = {"_system_config": {"prestart_worker_first_driver": False}}  # of all: workers that no one has asked for
    for arguments in json.loads(sys.argv[1]):
        sys.executable = arguments.pop("python", own)  # what Ray starts a node's processes with
        if sys.executable == own:
            fork_workers()
        else:  # what is forked would have the server's interpreter
            ray_constants.SETUP_WORKER_FILENAME = as_ray_does
        nodes.add_node(**arguments, **settings)
        settings = {}
    sys.executable = own
    nodes.wait_for_nodes()
    print(nodes.address, flush=True)
    for line in sys.stdin:
        nodes.add_node(**json.loads(line))
        nodes.wait_for_nodes()
        print(nodes.address, flush=True)
    nodes.shutdown()


if __name__ == "__main__":
    main()
