"""An object in a process of its own on a node of the cluster, for what no placement has bundles for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from corerl.cluster.failures import death
from corerl.cluster.heartbeat import ASIDE
from corerl.cluster.process import spawn
from corerl.errors import CorerlError
from corerl.messages import last_line


def own_address() -> str:
    """The IP address by which the cluster's other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


class RemoteObject:
    """An object of a plain class in a process of its own. The process reserves no resources, and ends with the one that
    has started it. Any thread may use it."""

    def __init__(self, name: str, target: str, *args: Any, node: str, environment: Mapping[str, str]) -> None:
        """Have `target`, "module:Class", called with `args` in a new process on this node (Ray's id); waits for
        nothing. `name` is for messages, `environment` is set before the class is imported."""
        self._name = name
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        self._actor = spawn(
            name,
            target,
            options={"num_cpus": 0, "scheduling_strategy": there},
            neighbors=os.cpu_count() or 1,  # any number of them may be there: one thread each
            environment=dict(environment),
        )
        self._made = self._actor.construct.remote(0, *args)

    def send(self, method: str, *args: Any) -> None:
        """Have a method called, after those that were sent before; waits for nothing, and raises nothing."""
        self._actor.call.remote(0, method, *args)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method beside those that are sent, and wait for its result. Raises WorkerDied if the process or its
        node is gone, and the CorerlError of the method or of the object's construction."""
        try:
            result = ray.get(self._made)
            if result.error is None:
                result = ray.get(self._actor.call.options(concurrency_group=ASIDE).remote(0, method, *args))
        except RayError as error:
            why = f"{self._name}: the arguments or the result of {method} could not be transferred: {last_line(error)}"
            raise death(error, self._name, method) or CorerlError(why) from error
        if result.error is not None:
            raise result.error
        return result.value

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        ray.kill(self._actor, no_restart=True)
