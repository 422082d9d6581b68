"""Which reserved bundle is whose; Ray is asked in test_group.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RpcError, WorkerCrashedError

from corerl.cluster import placement
from corerl.cluster.arrangement import arrange
from corerl.cluster.placement import Bundle, Gpu, ResourcePool, Slot, gpus_of_bundles, physical_order
from corerl.errors import CorerlError, InsufficientResources
from tests.cluster.rooms import gpus, moves, on, rooms_of

__all__ = ["moves"]  # a fixture


def test_ranks_follow_the_order_of_machines_and_devices() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "a"}
    numbers = {bundle: Gpu.named(number, ()) for bundle, number in enumerate(["2", "10", "0", "3"])}
    assert physical_order(nodes, numbers) == [3, 1, 2, 0]
    assert physical_order(nodes, {}) == [1, 3, 0, 2]


def test_named_gpus_are_in_the_machines_order() -> None:
    visible = ["GPU-8f", "MIG-3a", "GPU-0c"]
    names = {bundle: Gpu.named(name, visible) for bundle, name in enumerate(["GPU-0c", "GPU-8f", "MIG-3a"])}
    assert physical_order(dict.fromkeys(names, "a"), names) == [1, 2, 0]
    nowhere: Any = None
    slot = Slot(tuple(Bundle(nowhere, index, "a", gpu) for index, gpu in names.items()), 0.0, 0.0)
    assert slot.environment() == {"CUDA_VISIBLE_DEVICES": "GPU-0c,GPU-8f,MIG-3a"}


def answering(monkeypatch: pytest.MonkeyPatch, get: Callable[[int, float], Gpu], now: list[float]) -> list[int]:
    """Bundles, asked for their GPUs by number, answer as `get` says; returns those that nobody waits for any more."""
    cancelled: list[int] = []

    def options(*, scheduling_strategy: Any, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda: scheduling_strategy.placement_group_bundle_index)

    monkeypatch.setattr(placement, "_gpu_of_bundle", SimpleNamespace(options=options))
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[-1])
    monkeypatch.setattr(placement.ray, "get", get)
    monkeypatch.setattr(placement.ray, "cancel", lambda asked, force: cancelled.append(asked))
    return cancelled


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (GetTimeoutError("Get timed out: some object(s) not ready."), "no answer within 120 s"),
        (WorkerCrashedError(), "The worker died unexpectedly while executing this task. Check python-core-worker-"),
    ],
)
def test_a_gpu_that_does_not_answer_is_one_line(error: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(asked: int, timeout: float) -> Gpu:
        assert timeout == 120.0
        if asked == 3:
            raise error
        return Gpu(6, "6")

    cancelled = answering(monkeypatch, get, now=[7.0])
    nowhere: Any = None
    assert gpus_of_bundles(nowhere, {4: "node-8"}) == {4: Gpu(6, "6")} and cancelled == []
    with pytest.raises(InsufficientResources) as caught:
        gpus_of_bundles(nowhere, {4: "node-8", 3: "node-7"})
    assert caught.value.message.startswith(f"cannot tell which GPU bundle 3 has on node node-7: {why}")
    assert "\n" not in caught.value.message
    assert cancelled == [4, 3]  # nobody waits for them any more


def test_all_gpus_together_have_the_time_that_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    given: list[float] = []

    def get(asked: int, timeout: float) -> Gpu:
        given.append(timeout)
        now.append(now[-1] + min(timeout, 70.0))
        return Gpu(asked, str(asked))

    answering(monkeypatch, get, now)
    nowhere: Any = None
    gpus_of_bundles(nowhere, dict.fromkeys(range(3), "node-7"))
    assert given == [120.0, 50.0, 0.0]


def test_a_reservation_with_an_unknown_gpu_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[object] = []
    group = SimpleNamespace(wait=lambda timeout_seconds: True)

    def silent(_: object, at: Mapping[int, str]) -> dict[int, Gpu]:
        raise InsufficientResources("cannot tell which")

    monkeypatch.setattr(placement, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(placement, "placement_group_table", lambda _: {"bundles_to_node_id": {0: "a", 1: "b"}})
    monkeypatch.setattr(placement, "gpus_of_bundles", silent)
    monkeypatch.setattr(placement, "remove_placement_group", given_back.append)
    with pytest.raises(InsufficientResources, match="^cannot tell which$"):
        ResourcePool(timeout=1.0).arrange(arrange({"actor": 2}, cpus=1.0, gpus=1.0))
    assert given_back == [group]


def test_first_processes_request_their_share_of_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = rooms_of(monkeypatch, 8)
    rooms.begin({"actor": 2, "engines": 1})
    assert {name: gpus(slots) for name, slots in rooms.items()} == {"actor": [(0,), (1,)], "engines": [(0,)]}
    assert [(slot.cpus, slot.gpus, slot.neighbors) for slot in rooms["actor"]] == [(0.5, 0.5, 2), (1.0, 1.0, 2)]
    assert [slot.environment() for slot in rooms["actor"]] == [{}, {}]
    assert rooms.reserved == [2] and len(rooms) == 2


# ---- machines that are gone ------------------------------------------------------------------------------------------


def test_slots_of_a_lost_machine_follow_their_bundles(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = rooms_of(monkeypatch, 2)
    pool.begin({"actor": 4, "engines": 2})
    before = {name: list(slots) for name, slots in pool.items()}
    on(moves, ["node 2", "node 3", "node 1", "node 1"])
    pool.poll()
    assert [(slot.node, slot.devices, slot.neighbors) for slot in pool["actor"]] == [
        *(("node 2", ("7",), 1), ("node 3", ("7",), 1)),
        *(("node 1", ("0",), 2), ("node 1", ("1",), 2)),
    ]
    assert [(slot.node, slot.lost) for slot in pool["engines"]] == [("node 2", False), ("node 1", False)]
    assert list(pool["actor"][2:]) == before["actor"][2:]  # the same objects: nothing has happened to these
    assert [slot.cpus for slot in pool["actor"]] == [slot.cpus for slot in before["actor"]]


def test_free_bundles_are_counted_by_the_scarcest_resource(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"CPU": 9.0, "GPU": 3.0, "memory": 5.0}
    monkeypatch.setattr(placement.ray, "available_resources", lambda: free)
    pool = rooms_of(monkeypatch, 2)
    pool.begin({"actor": 6, "engines": 3})
    assert pool.count({"CPU": 2.0, "GPU": 1.0}) == (6, 0, 3)
    assert pool.count({"CPU": 4.0, "GPU": 1.0}) == (6, 0, 2)
    assert pool.count({"CPU": 1.0, "h200": 1.0}) == (6, 0, 0)
    pool.take({"actor": pool["actor"][:3]})  # bundles 0 to 2, and engines on 0, 2 and 4
    on(moves, ["node 0", "", "node 1", "", "node 2", ""])
    assert pool.count({"GPU": 1.0}) == (3, 0, 3)
    on(moves, ["node 0", "", "node 1", "node 7", "node 2", "node 8"])  # the cluster has other machines now
    assert pool.count({"GPU": 1.0}) == (5, 2, 3)
    pool.begin({"actor": 5, "engines": 3})
    assert pool.count({"GPU": 1.0}) == (5, 0, 3)

    def silent() -> dict[str, float]:
        raise RpcError("GCS is unavailable\nin many lines")

    monkeypatch.setattr(placement.ray, "available_resources", silent)
    with pytest.raises(CorerlError, match="^Ray does not report its devices: GCS is unavailable$"):
        pool.count({"GPU": 1.0})
