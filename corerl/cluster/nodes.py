"""Name the nodes of a Ray cluster, and call a function on each."""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import ray
from attrs import frozen
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from corerl.errors import CorerlError
from corerl.messages import last_line

POLL_SECONDS = 0.5  # between two checks whether nodes answer
GONE_WITHIN = 120.0  # seconds for Ray to say of a node that it has died
SIOCGIFADDR = 0x8915  # of Linux, from linux/sockios.h: the address of an interface


@frozen(kw_only=True)
class Answer:
    """One node's answer."""

    node: str
    value: Any = None
    error: str = ""  # why there is no value, in one line


def this_node() -> str:
    """The name of this process's machine; in a cluster, with what distinguishes the node from others."""
    if not ray.is_initialized():
        return socket.gethostname()
    own = ray.get_runtime_context().get_node_id()
    return next((_label(node) for node in ray.nodes() if node["NodeID"] == own), socket.gethostname())


def living_nodes() -> dict[str, str]:
    """Ray's id of each live node that has CPUs, and what messages call it. A head that was started without takes no
    work."""
    return {node["NodeID"]: _label(node) for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}


def own_address() -> str:
    """The IP address by which the cluster's other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str:
    """This machine's network interface that has the IPv4 `address`; "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def require_ray() -> None:
    """Raise CorerlError if the Ray of this machine has died: new processes would wait for it for ever."""
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
        raise CorerlError(f"Ray's raylet on this machine has died; see its logs ({logs()})")


def logs() -> str:
    """Where Ray's logs are, on each of its machines."""
    return os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs")


def elsewhere(nodes: Iterable[str]) -> set[str]:
    """The nodes (Ray's ids) other than this process's."""
    return set(nodes) - {ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""}


def gone(nodes: Collection[str]) -> set[str]:
    """The nodes (Ray's ids) that are dead. A node that does not answer may be busy: Ray reports its death after 15
    seconds by default. A node that is not reported within `GONE_WITHIN` counts as alive."""
    waiting = elsewhere(nodes)
    asked = {node: _call_on(node, "os:getpid") for node in waiting}
    found: set[str] = set()
    until = time.monotonic() + GONE_WITHIN
    while waiting and time.monotonic() < until:
        ray.wait([asked[node] for node in waiting], num_returns=len(waiting), timeout=POLL_SECONDS)
        found |= waiting - {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        waiting -= found
        for node in list(waiting):
            if ray.wait([asked[node]], timeout=0)[0]:
                try:
                    ray.get(asked[node])
                    waiting.remove(node)
                except RayError:  # it cannot be reached
                    time.sleep(POLL_SECONDS)
                    asked[node] = _call_on(node, "os:getpid")
    return found


def ask_each_node(target: str, *args: Any, environment: Mapping[str, str], timeout: float) -> list[Answer]:
    """Call `target`, "module:function", in a process on every live node, without reserving resources.

    `environment` is set before the process imports anything; `timeout`, in seconds, is for all nodes together.
    """
    living = [node for node in ray.nodes() if node["Alive"]]
    asked = {_call_on(node["NodeID"], target, *args, environment=environment): _label(node) for node in living}
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
    answers = [Answer(node=asked[ref], error=f"no answer within {timeout:g} s") for ref in silent]
    for ref in answered:
        try:
            answers.append(Answer(node=asked[ref], value=ray.get(ref)))
        except (RayError, ImportError, RuntimeError) as error:  # the node may lack even the function
            answers.append(Answer(node=asked[ref], error=last_line(error)))
    return sorted(answers, key=lambda answer: answer.node)


def _call_on(node: str, target: str, *args: Any, environment: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Call `target` on one node (Ray's id); returns a reference to the result."""
    options = {"num_cpus": 0, "max_retries": 0, "runtime_env": {"env_vars": dict(environment)} if environment else {}}
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return _call.options(scheduling_strategy=there, **options).remote(target, args)


@ray.remote
def _call(target: str, args: tuple[Any, ...]) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


def _label(node: Mapping[str, Any]) -> str:
    """The machine's name, followed in brackets by Ray's name or address of the node and the start of its id."""
    return f"{node['NodeManagerHostname']} ({node['NodeName'] or node['NodeManagerAddress']}, id {node['NodeID'][:8]})"
