"""A cluster without Ray: machines that go and come, and the bundles that a run has reserved on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from corerl.cluster import placement
from corerl.cluster.arrangement import Placement, arrange
from corerl.cluster.placement import Bundle, Gpu, ResourcePool, Slot


class Rooms(ResourcePool):
    """A pool in a cluster where each reservation is a name, and GPUs are numbered as they are reserved, `per_node`."""

    moves: Mapping[tuple[str, int], str] = MappingProxyType({})  # reservation and bundle -> its machine by now

    def __init__(self, per_node: int) -> None:
        super().__init__(timeout=1.0)
        self.per_node = per_node
        self.reserved: list[int] = []  # bundles of each reservation
        self.given_back: list[str] = []

    def _reserve(self, bundle: Mapping[str, float], count: int) -> list[Bundle]:
        first, group = sum(self.reserved), f"reservation {len(self.reserved)}"
        numbers = [divmod(first + index, self.per_node) for index in range(count)]
        new = [Bundle(group, index, f"node {node}", Gpu(gpu, str(gpu))) for index, (node, gpu) in enumerate(numbers)]  # type: ignore[arg-type]
        self.reserved.append(count)
        self._bundles += new
        return new

    def table(self, group: str) -> dict[str, Any]:
        """As Ray tells of a reservation."""
        at = {each.index: each.node for each in self._bundles if each.group == group}  # type: ignore[comparison-overlap]
        moved = {index: node for (of, index), node in self.moves.items() if of == group}
        return {"bundles_to_node_id": at | moved}

    def begin(self, groups: Mapping[str, int], **how: Any) -> None:
        self.take(self.arrange(on_gpus(groups, **how)))


def on_gpus(groups: Mapping[str, int], **how: Any) -> Placement:
    """A placement of groups with a GPU for each process that is alone on its bundle."""
    return arrange(groups, cpus=1.0, gpus=1.0, **how)


def rooms_of(monkeypatch: pytest.MonkeyPatch, per_node: int) -> Rooms:
    pool = Rooms(per_node)
    monkeypatch.setattr(placement, "placement_group_table", pool.table)
    monkeypatch.setattr(placement, "remove_placement_group", pool.given_back.append)
    return pool


def gpus(slots: Iterable[Slot]) -> list[tuple[int, ...]]:
    return [tuple(map(int, slot.devices)) for slot in slots]


def are_gone(monkeypatch: pytest.MonkeyPatch, *machines: str) -> None:
    """These machines are gone."""
    monkeypatch.setattr(placement.nodes, "gone", lambda nodes: set(nodes) & {*machines})


def are_left(monkeypatch: pytest.MonkeyPatch, *machines: str) -> None:
    """All other machines are gone."""
    monkeypatch.setattr(placement.nodes, "gone", lambda nodes: set(nodes) - {*machines})


def has_free(monkeypatch: pytest.MonkeyPatch, **resources: float) -> None:
    """The cluster has these resources free, by Ray's names."""
    monkeypatch.setattr(placement.ray, "available_resources", lambda: resources)


def gpus_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of bundles that have moved have the bundles' numbers."""
    monkeypatch.setattr(placement, "gpus_of_bundles", lambda _, at: {index: Gpu(index, str(index)) for index in at})


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], str]:
    """Bundle -> the machine that the cluster has put it on, "" for none, of those of "node 0", which is gone; each of
    its GPUs has the number 7 then."""
    moved: dict[tuple[str, int], str] = {}
    monkeypatch.setattr(Rooms, "moves", moved)
    monkeypatch.setattr(placement, "gpus_of_bundles", lambda _, nodes: dict.fromkeys(nodes, Gpu(7, "7")))
    are_gone(monkeypatch, "node 0")
    return moved


def on(moves: dict[tuple[str, int], str], nodes: Sequence[str]) -> None:
    moves.update({("reservation 0", index): node for index, node in enumerate(nodes)})
