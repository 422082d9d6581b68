"""How long a run waits for the places of lost processes, and what it has left, in a room without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from corerl.cluster import ResourcePool
from corerl_elastic import places as module
from corerl_elastic.places import Places
from corerl_elastic.slots import without_lost
from tests.cluster.rooms import are_gone, gpus, moves, on, on_gpus, rooms_of

__all__ = ["moves"]  # a fixture


def test_a_room_waits_once_for_the_same_bundles(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = rooms_of(monkeypatch, 1)
    pool.begin({"actor": 3})
    waited, places = [0.0], Places(pool)
    monkeypatch.setattr(module.time, "monotonic", lambda: waited[-1])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: waited.append(waited[-1] + seconds))

    def settled() -> tuple[float, list[bool]]:
        before = waited[-1]
        pool.poll()
        places.settle(within=60.0)
        return waited[-1] - before, [slot.lost for slot in pool["actor"]]

    on(moves, ["", "node 1", "node 2"])
    assert settled() == (60.0, [True, False, False])
    assert settled() == (0.0, [True, False, False])
    are_gone(monkeypatch, "node 1")
    assert settled() == (60.0, [True, True, False])
    on(moves, ["node 9", "", "node 2"])  # later than the run has waited, but it has come
    assert settled() == (0.0, [False, True, False])
    on(moves, ["", "", "node 2"])
    assert settled() == (60.0, [True, True, False])  # the machine that came is gone too


def waiting(
    pool: ResourcePool,
    moves: dict[tuple[str, int], str],
    monkeypatch: pytest.MonkeyPatch,
    later: Mapping[float, Sequence[str]],
) -> float:
    """The seconds that a room waits at most a minute, while the cluster puts its bundles on the nodes of `later`, by
    second."""
    waited = [0.0]

    def sleep(seconds: float) -> None:
        waited.append(waited[-1] + seconds)
        on(moves, later.get(waited[-1], []))

    monkeypatch.setattr(module.time, "monotonic", lambda: waited[-1])
    monkeypatch.setattr(module.time, "sleep", sleep)
    pool.poll()
    Places(pool).settle(within=60.0)
    return waited[-1]


def test_nothing_is_awaited_that_an_unused_bundle_can_replace(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = rooms_of(monkeypatch, 2)
    pool.begin({"actor": 5})
    pool.take({"actor": pool["actor"][:3]})  # on nodes 0 and 1; two bundles are unused, on nodes 1 and 2
    on(moves, ["", "", "node 1", "node 1", "node 2"])
    assert waiting(pool, moves, monkeypatch, {}) == 0.0
    assert [slot.lost for slot in pool["actor"]] == [True, True, False] and Places(pool).unused == 2
    found = without_lost(pool, on_gpus({"actor": 3}), [])
    places = [(slot.node, gpus([slot])) for slot in found["actor"]]
    assert places == [("node 1", [(0,)]), ("node 1", [(1,)]), ("node 2", [(0,)])]
    assert pool.reserved == [5]


def test_the_wait_is_for_bundles_beyond_the_unused_ones(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = rooms_of(monkeypatch, 3)
    pool.begin({"actor": 4})
    pool.take({"actor": pool["actor"][:3]})  # on node 0; one bundle is unused, on node 1
    on(moves, ["", "", "", "node 1"])
    later = {4.0: ["node 8", "", "", "node 1"], 9.0: ["node 8", "", "node 9", "node 1"]}
    assert waiting(pool, moves, monkeypatch, later) == 9.0
    places = [(slot.node, slot.lost) for slot in pool["actor"]]
    assert places == [("node 8", False), ("node 0", True), ("node 9", False)]


def test_a_wide_process_waits_for_adjacent_bundles(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = rooms_of(monkeypatch, 2)
    pool.begin({"actor": 4, "engines": 1}, own_devices=["actor"], widths={"engines": 2})
    pool.take({"actor": pool["actor"][1:3]})  # the engine is on node 0, a bundle of nodes 1 and 2 each is unused
    on(moves, ["", "", "node 1", "node 1", "node 2", "node 2"])
    assert waiting(pool, moves, monkeypatch, {7.0: ["node 9", "node 9"]}) == 7.0
    assert [(slot.node, slot.lost) for slot in pool["engines"]] == [("node 9", False)]


def test_a_group_of_its_own_loses_its_own_bundles(
    moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = rooms_of(monkeypatch, 2)
    separate = ["engines"]
    pool.begin({"actor": 2, "engines": 2}, own_devices=separate, widths={"engines": 2})
    are_gone(monkeypatch, "node 1")
    on(moves, ["node 0", "node 0", "", "", "node 2", "node 2"])
    pool.poll()
    assert [Places(pool).left(name, separate=separate) for name in ("actor", "engines")] == [2, 2]
