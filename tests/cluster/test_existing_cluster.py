"""A run in a Ray cluster that is there already: two nodes on this machine, one of them with a custom resource."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from corerl.cluster.arrangement import arrange
from corerl.cluster.group import RayGroup, RemoteObject
from corerl.cluster.nodes import gone, interface_of, living_nodes, own_address
from corerl.cluster.placement import reserved
from corerl.cluster.runtime import put, ray_session
from corerl.errors import CorerlError, WorkerDied, WrongState
from tests.cluster.nodes import cluster
from tests.cluster.ranks import RAYS_OWN
from tests.machine import paced

pytestmark = pytest.mark.processes

MEMBER = "tests.cluster.members:Member"
RANK = "tests.cluster.ranks:Rank"
STORE = 100 * 2**20  # bytes of each node's object store
ENDS_WITHIN = paced(60.0)  # seconds
NAMES = ["GPU-8f2c", "MIG-0c11"]  # of GPUs that Ray takes to be there; nobody looks
FULL_DISK = {"RAY_local_fs_capacity_threshold": "0.0001"}  # what Ray then finds: it writes to none above this share


class OnlyHere:
    """Another process cannot read it."""

    def __reduce__(self) -> Any:
        return exec, ("raise ImportError('no module here')",)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    node = {"num_cpus": 2, "object_store_memory": STORE}
    head = {**node, "resources": {"h200": 2}, "num_gpus": len(NAMES), "include_dashboard": False}
    with cluster(head, node, CUDA_VISIBLE_DEVICES=",".join(NAMES), **FULL_DISK) as address:
        yield address


def test_ranks_on_two_nodes_meet_and_free_their_bundles(address: str) -> None:
    environment = {"OMP_NUM_THREADS": "1"}
    with ray_session(address=address, cpus=4.0):
        there = ray.cluster_resources()["CPU"]
        with reserved(arrange({"ranks": 4}), timeout=paced(60.0)) as slots:
            names = [f"actor rank {rank}" for rank in range(4)]
            group = RayGroup(names, RANK, slots["ranks"], environment)
            host, port, listening = group.listen(0)
            group.wait(group.construct([(rank, 4) for rank in range(4)]))
            group.wait(
                group.start_each("init", [(host, port, listening if rank == 0 else None, "") for rank in range(4)])
            )
            nodes = group.call("node")
            assert nodes[0] == nodes[1] != nodes[2] == nodes[3]  # neighbors in rank are neighbors in the machine
            assert group.nodes == nodes
            assert group.call("train", "") == [10.0] * 4
            known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            assert group.call("hosts") == [[known[node], RAYS_OWN] for node in nodes]
            assert group.call("interface") == [interface_of(known[node]) for node in nodes] != [""] * 4
            group.kill()
    with ray_session(address=address, cpus=4.0):
        assert ray.cluster_resources()["CPU"] == there == 4.0
        assert len(ray.nodes()) == 2
        deadline = time.monotonic() + ENDS_WITHIN
        while ray.available_resources().get("CPU") != there:
            assert time.monotonic() < deadline, ray.available_resources()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def joined(address: str) -> Iterator[None]:
    """Once, for tests that do not care when: to ask whether a cluster answers takes more than a second."""
    with ray_session(address=address):
        yield


def ask_until_it_is_gone(killed: RemoteObject) -> None:
    """A busy node ends a process a moment after it is told to."""
    deadline = time.monotonic() + paced(20.0)
    while time.monotonic() < deadline:
        killed.ask("notes")


def test_a_nodes_object_is_called_in_order_and_aside(joined: None) -> None:
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    assert living_nodes().keys() == known.keys() and {own_address()} == set(known.values())
    made = [
        RemoteObject(name, MEMBER, 0, node=node, environment={"CORERL_TEST_WORD": name})
        for node, name in living_nodes().items()
    ]
    assert [each.ask("node") for each in made] == list(living_nodes())
    assert [each.ask("word") for each in made] == list(living_nodes().values())
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]
    one, other = made
    for value in range(50):
        one.send("note", value)
    one.send("through")  # waits; what is asked meanwhile does not
    deadline = time.monotonic() + paced(20.0)
    while len(one.ask("notes")) < 50:
        assert time.monotonic() < deadline
    assert one.ask("notes") == list(range(50))
    with pytest.raises(WrongState, match="^ask later$"):
        one.ask("refuse", 0)
    one.kill()
    one.kill()
    with pytest.raises(WorkerDied, match=rf"^{re.escape(next(iter(living_nodes().values())))}: its process died "):
        ask_until_it_is_gone(one)
    assert other.ask("notes") == []
    other.kill()


def test_an_object_that_cannot_be_made_says_why(joined: None) -> None:
    made = RemoteObject("noter", f"{MEMBER}s", node=next(iter(living_nodes())), environment={})
    with pytest.raises(CorerlError, match="^noter: start: .*Members"):
        made.ask("notes")
    made.kill()
    made = RemoteObject("noter", MEMBER, OnlyHere(), node=next(iter(living_nodes())), environment={})
    with pytest.raises(CorerlError, match="^noter: the arguments .* could not be transferred: .*no module here$"):
        made.ask("notes")
    made.kill()


def test_nodes_that_are_gone_are_told_from_those_that_answer(joined: None) -> None:
    never = "ab" * 28
    assert gone({*(node["NodeID"] for node in ray.nodes()), never}) == {never}


def test_bundles_go_where_the_custom_resource_is(joined: None) -> None:
    having = [node["NodeID"] for node in ray.nodes() if "h200" in node["Resources"]]
    with reserved(arrange({"ranks": 2}, resources={"h200": 1.0}), timeout=paced(60.0)) as slots:
        group = RayGroup(["actor rank 0", "actor rank 1"], MEMBER, slots["ranks"], {})
        group.wait(group.construct([(0,), (1,)]))
        assert group.call("node") == having * 2
        group.kill()


def test_gpus_with_names_are_known_by_them(joined: None) -> None:
    with reserved(arrange({"ranks": 2}, gpus=1.0), timeout=paced(60.0)) as slots:
        assert [slot.devices for slot in slots["ranks"]] == [(name,) for name in NAMES]


def test_a_full_object_store_and_disk_are_one_line(joined: None) -> None:
    kept = put(np.ones(STORE // 2, dtype=np.uint8))
    with pytest.raises(CorerlError) as caught:
        put({"tokens": np.ones(STORE, dtype=np.uint8)})
    assert ray.get(kept).sum() == STORE // 2
    assert caught.value.message == (
        "Ray's object store is full, and so is the disk that it spills to (see df and `ray memory`); free disk space, "
        "use a smaller rollout batch, or start Ray with more --object-store-memory"
    )
