"""Workers of episodes on all nodes of the run's Ray cluster.

On its node, a worker's process is started by one of Ray's, which hands messages on and outlives it: it tells the driver
how the worker has ended, and kills what that has left running. Ray brings the messages, so that no node listens.
"""

from __future__ import annotations

import os
import queue
import secrets
import sys
import threading
from collections.abc import Mapping
from types import ModuleType

from corerl.cluster import RemoteObject, living_nodes, own_address
from corerl.errors import CorerlError, WorkerDied
from corerl_agents.commands import kill_marked
from corerl_agents.config import EpisodesConfig
from corerl_agents.workers import EXIT, Gone, LocalProcess

MARK = "CORERL_EPISODES_WORKER"  # in the environment of a worker, and of what it starts


class NodeProcesses:
    """Begins workers' processes, each on the node that has fewest of them."""

    def __init__(self, options: EpisodesConfig, environment: Mapping[str, str]) -> None:
        self._options, self._environment = options, environment
        self._begun: list[NodeProcess] = []
        self.address = own_address()  # where all nodes reach this process

    def __call__(self) -> NodeProcess:
        nodes = living_nodes()
        self._begun = [each for each in self._begun if not each.gone]
        node = min(nodes, key=lambda node: sum(each.node == node for each in self._begun), default="")
        if not node:
            raise WorkerDied("no node of the Ray cluster is left for a worker of episodes; see `ray status`")
        name = f"a worker of episodes on {nodes[node]}"
        target, arguments = "corerl_agents.nodes:Host", (self._options, os.getcwd())
        host = RemoteObject(name, target, *arguments, node=node, environment=self._environment)
        self._begun.append(NodeProcess(node, host))
        return self._begun[-1]


class NodeProcess:
    """A worker's process on a node."""

    def __init__(self, node: str, host: RemoteObject) -> None:
        self.node = node  # Ray's id
        self.gone = False
        self._host = host
        self._killing = threading.Lock()  # taken by the first who kills it
        self._late = threading.Timer(EXIT, host.kill)  # the host may be gone, or not be reached
        self._late.daemon = True

    def send(self, message: bytes) -> None:
        self._host.send("send", message)

    def receive(self) -> bytes:
        try:
            said = self._host.ask("receive")
        except CorerlError as error:
            self.gone = True
            raise Gone(error.message, lost=isinstance(error, WorkerDied)) from error
        if isinstance(said, str):
            self.gone = True
            raise Gone(said)
        return bytes(said)

    def kill(self) -> None:
        self.gone = True
        if self._killing.acquire(blocking=False):
            self._host.send("kill")  # the worker may be in code that lets it notice nothing
            self._late.start()

    def end(self) -> None:
        self.kill()
        self._late.cancel()
        self._host.kill()


# ---- in a process of Ray's -------------------------------------------------------------------------------------------


class Host:
    """Starts a worker's process on its node, and hands messages on."""

    def __init__(self, options: EpisodesConfig, directory: str) -> None:
        sys.modules["__main__"] = ModuleType("__main__")  # in place of Ray's, which the new process would import
        self._mark = os.environ[MARK] = secrets.token_hex(16)
        self._process = LocalProcess(options, directory)
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # a hanging worker reads none
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        while True:
            self._process.send(self._messages.get())

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def receive(self) -> bytes | str:
        """The worker's next message; how it has ended, if it has."""
        try:
            return self._process.receive()
        except Gone as gone:
            self.kill()
            return gone.status

    def kill(self) -> None:
        self._process.kill()
        kill_marked(self._mark)  # commands are in groups of their own
