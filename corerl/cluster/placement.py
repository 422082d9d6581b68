"""Bundles of one device each, in physical order, and who sits on which."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import ray
from attrs import frozen
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from corerl.errors import CorerlError


@frozen(eq=False)
class Seat:
    """A share of one bundle, for one process."""

    group: PlacementGroup
    bundle: int
    cpus: float
    gpus: float

    def options(self) -> dict[str, object]:
        """As keyword arguments of a Ray actor's `.options`."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle
        )
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}


@frozen(kw_only=True)
class Seating:
    """Where a run's processes go: plain numbers, made from the config before Ray is asked."""

    places: Mapping[str, tuple[int, ...]]  # group of processes -> bundle of each of them
    bundles: int
    bundle: Mapping[str, float]  # what each is of a machine, by Ray's names of resources

    def share(self, bundle: int) -> float:
        """Of the bundle, for each process on it."""
        return 1.0 / sum(places.count(bundle) for places in self.places.values())

    @property
    def cpus(self) -> float:
        """Of all bundles."""
        return self.bundles * self.bundle["CPU"]


def arrange(
    groups: Mapping[str, int],
    *,
    apart: Collection[str] = (),
    cpus: float,
    gpus: float,
    resources: Mapping[str, float] | None = None,
) -> Seating:
    """Give each group of so many processes its bundles: those `apart` have their own, all others share the same ones,
    as many as the largest group needs, and each group spread evenly over them.

    A bundle is `cpus`, `gpus` and custom `resources`: what one process takes of a machine where it is alone.
    """
    places: dict[str, tuple[int, ...]] = {}
    bundles = max((count for name, count in groups.items() if name not in apart), default=0)
    for name, count in groups.items():
        if name in apart:
            places[name] = tuple(range(bundles, bundles + count))
            bundles += count
        else:
            shared = max(size for other, size in groups.items() if other not in apart)
            places[name] = tuple(index * shared // count for index in range(count))
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **(resources or {})}
    return Seating(places=places, bundles=bundles, bundle=bundle)


@contextlib.contextmanager
def seated(seating: Seating, *, timeout: float) -> Iterator[dict[str, list[Seat]]]:
    """Reserve the bundles, and give them back at the end; yields the seats of each group.

    Bundles are taken in the order of (node, device). `timeout`: seconds to wait until the cluster has them free.
    Raises CorerlError where the cluster has too little: what is there, what is asked.
    """
    bundle = dict(seating.bundle)
    gpus = bundle.get("GPU", 0.0)
    group = placement_group([bundle] * seating.bundles, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=timeout):
            there, free = ray.cluster_resources(), ray.available_resources()
            listed = ", ".join(
                f"{name} {free.get(name, 0.0):g} free of {there.get(name, 0.0):g}, {amount * seating.bundles:g} asked"
                for name, amount in bundle.items()
            )
            raise CorerlError(
                f"the cluster has no room for {seating.bundles} bundles of {bundle}: {listed}; "
                "use fewer ranks or engines, or a larger cluster"
            )
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        order = physical_order(nodes, gpus_of_bundles(group, nodes) if gpus else {})
        yield {
            name: [
                Seat(group, order[place], bundle["CPU"] * seating.share(place), gpus * seating.share(place))
                for place in places
            ]
            for name, places in seating.places.items()
        }
    finally:
        remove_placement_group(group)


def physical_order(nodes: Mapping[int, str], gpus: Mapping[int, int]) -> list[int]:
    """Bundles sorted by (node, GPU), so that neighbouring ranks are neighbours in the machine; both maps by bundle."""
    return sorted(nodes, key=lambda bundle: (nodes[bundle], gpus.get(bundle, 0), bundle))


def gpus_of_bundles(group: PlacementGroup, bundles: Iterable[int]) -> dict[int, int]:
    """Ask a process on each bundle which GPU of its machine it was given."""
    probes = {index: _gpu_of_bundle.options(**Seat(group, index, 0.0, 1.0).options()).remote() for index in bundles}
    return {index: ray.get(probe) for index, probe in probes.items()}


@ray.remote
def _gpu_of_bundle() -> int:
    return int(ray.get_gpu_ids()[0])
