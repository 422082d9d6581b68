"""Which bundle is whose where groups get other sizes and some processes stay, in rooms without Ray."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from corerl.cluster import Slot
from corerl.errors import CorerlError
from corerl_elastic.slots import arranged, without_lost
from tests.cluster.rooms import Rooms, are_gone, gpus, moves, on, on_gpus, rooms_of

__all__ = ["moves"]  # a fixture


def moved(pool: Rooms, groups: Mapping[str, int], staying: Mapping[str, int], **how: Any) -> dict[str, Sequence[Slot]]:
    """Slots for other sizes, which are not taken yet."""
    return arranged(pool, on_gpus(groups, **how), staying)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    return rooms_of(monkeypatch, 8)


@pytest.mark.parametrize(("ranks", "before", "after"), [(4, 2, 3), (6, 3, 5), (6, 6, 2), (8, 2, 6)])
def test_engines_share_no_device_while_others_are_free(ranks: int, before: int, after: int, rooms: Rooms) -> None:
    rooms.begin({"actor": ranks, "engines": before})
    staying = {"actor": ranks, "engines": min(before, after)}
    slots = moved(rooms, {"actor": ranks, "engines": after}, staying)
    assert list(slots["actor"]) == list(rooms["actor"])
    assert list(slots["engines"][: min(before, after)]) == list(rooms["engines"][: min(before, after)])
    assert len(set(gpus(slots["engines"]))) == len(slots["engines"]) == after
    assert rooms.reserved == [ranks]


def test_moved_ranks_share_devices_with_staying_engines(rooms: Rooms) -> None:
    rooms.begin({"actor": 2, "engines": 2})
    slots = moved(rooms, {"actor": 4, "engines": 2}, {"engines": 2})
    assert gpus(slots["engines"]) == [(0,), (1,)]
    assert gpus(slots["actor"]) == [(0,), (2,), (1,), (3,)]  # an engine on every second rank's device, as planned
    rooms.take({"actor": slots["actor"]})
    back = moved(rooms, {"actor": 2, "engines": 2}, {"engines": 2})
    assert gpus(back["actor"]) == [(0,), (1,)] and rooms.given_back == []
    rooms.take({"actor": back["actor"]})
    assert rooms.given_back == ["reservation 1"]


def test_a_wide_process_on_two_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = rooms_of(monkeypatch, 4)
    how: dict[str, Any] = {"own_devices": ["engines"], "widths": {"engines": 2}}
    pool.begin({"actor": 1, "engines": 1}, **how)
    with pytest.raises(CorerlError, match="^engines: one process takes 2 bundles, but Ray placed them on several "):
        moved(pool, {"actor": 1, "engines": 2}, {"actor": 1, "engines": 1}, **how)
    pool.take({})
    assert pool.given_back == ["reservation 1"]
    assert gpus(pool["engines"]) == [(1, 2)]


def test_added_wide_engines_share_no_device_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = rooms_of(monkeypatch, 8)
    how: dict[str, Any] = {"widths": {"engines": 2}}
    pool.begin({"actor": 4, "engines": 3}, **how)
    slots = moved(pool, {"actor": 4, "engines": 4}, {"actor": 4, "engines": 3}, **how)
    assert gpus(slots["engines"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(slots["actor"]) == list(pool["actor"]) and pool.reserved == [6, 2]


def test_added_wide_engines_that_fit_nowhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = rooms_of(monkeypatch, 8)
    how: dict[str, Any] = {"widths": {"engines": 2, "judge": 2}}
    pool.begin({"actor": 6, "engines": 4, "judge": 3}, **how)
    with pytest.raises(CorerlError, match="^judge: no place for 2 more processes of 2 adjacent bundles, only for 1, "):
        moved(pool, {"actor": 6, "engines": 2, "judge": 5}, {"actor": 6, "engines": 2, "judge": 3}, **how)


def require_apart(slots: Mapping[str, Sequence[Slot]], separate: Sequence[str], what: object) -> None:
    """No two processes of a group have a bundle in common, and `separate` groups have none in common with others."""
    used = {name: [bundle for slot in own for bundle in slot.bundles] for name, own in slots.items()}
    for name, bundles in used.items():
        assert len(set(bundles)) == len(bundles), (name, what)
    for name in separate:
        others = {bundle for other, bundles in used.items() if other != name for bundle in bundles}
        assert not others & set(used[name]), (name, what)


@pytest.mark.parametrize("seed", range(8))
def test_groups_that_change_size_never_share_with_themselves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    names, done, kept = ["actor", "critic", "engines", "judge"], 0, 0
    for _ in range(60):
        per_node = choose.choice([4, 8])
        widths = {name: choose.choice([1, 2, 4]) for name in ("engines", "judge")}
        how: dict[str, Any] = {"own_devices": [name for name in names if choose.random() < 0.3], "widths": widths}
        groups = {name: choose.randint(1, 6) for name in names}
        what: list[Any] = [per_node, how, groups]
        with contextlib.suppress(CorerlError):  # one process would be on two machines, or fit nowhere
            (pool := rooms_of(monkeypatch, per_node)).begin(groups, **how)
            for _ in range(4):
                groups = {name: choose.randint(1, 6) for name in names}
                staying = {name: min(count, len(pool[name])) for name, count in groups.items() if choose.random() < 0.8}
                what.append((groups, staying))
                slots = moved(pool, groups, staying, **how)
                for name, count in staying.items():
                    assert list(slots[name][:count]) == list(pool[name][:count])
                require_apart(slots, how["own_devices"], what)
                pool.take(slots)
                done += 1
            are_gone(monkeypatch, choose.choice([slot.node for slot in pool["actor"]]))
            pool.poll()
            groups = {name: sum(not slot.lost for slot in slots) for name, slots in pool.items()}
            what.append(groups)
            found = without_lost(pool, on_gpus(groups, **how), [*choose.sample(names, 2)])
            require_apart(found, how["own_devices"], what)
            assert not any(slot.lost for slots in found.values() for slot in slots)
            kept += 1
    assert done > 60 and kept > 5


def test_smaller_groups_fit_on_what_is_left(moves: dict[tuple[str, int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = rooms_of(monkeypatch, 2)
    pool.begin({"actor": 4, "engines": 2})
    on(moves, ["", "node 0", "node 1", "node 1"])  # of one, Ray has not said yet that it is no more
    pool.poll()
    assert [slot.lost for slot in pool["actor"]] == [True, True, False, False]
    assert [slot.lost for slot in pool["engines"]] == [True, False]
    living = pool["engines"][1]
    found = without_lost(pool, on_gpus({"actor": 2, "engines": 2}), ["engines"])
    assert found["engines"][1] is living
    assert gpus(found["engines"]) == [(1,), (0,)] and gpus(found["actor"]) == [(0,), (1,)]
    assert all(slot.node == "node 1" and not slot.lost for slots in found.values() for slot in slots)
    fewer = without_lost(pool, on_gpus({"actor": 2, "engines": 1}), ["engines"])
    assert gpus(fewer["engines"]) == [(0,)]  # of the two that there were, the last one is to end
    pool.take(fewer)
    assert pool.reserved == [4] and pool.given_back == []
    on(moves, ["", "node 5", "node 1", "node 1"])  # later
    assert [slot.node for slot in moved(pool, {"actor": 3, "engines": 1}, {"engines": 1})["actor"]] == [
        *("node 1", "node 1", "node 5")
    ]
    assert pool.reserved == [4]
