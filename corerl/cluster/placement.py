"""Bundles of one device each, in physical order, and who sits on which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

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

    ranks: tuple[int, ...]  # bundle of each rank
    engines: tuple[int, ...]  # bundle of each engine
    bundles: int
    cpus_per_bundle: float
    gpus_per_bundle: float

    def share(self, bundle: int) -> float:
        """Of the bundle, for each process on it."""
        return 1.0 / (self.ranks.count(bundle) + self.engines.count(bundle))


def arrange(*, ranks: int, engines: int, placement: str, cpus: float, gpus: float) -> Seating:
    """`colocated`: engines share the ranks' bundles, spread evenly. `disaggregated`: each engine has its own.

    A bundle is `cpus` and `gpus`: what one process takes of a machine when it has its place to itself.
    """
    if placement == "colocated":
        bundles = max(ranks, engines)
        engine_seats = tuple(index * bundles // engines for index in range(engines))
    else:
        bundles = ranks + engines
        engine_seats = tuple(range(ranks, bundles))
    return Seating(
        ranks=tuple(range(ranks)),
        engines=engine_seats,
        bundles=bundles,
        cpus_per_bundle=cpus,
        gpus_per_bundle=gpus,
    )


@contextlib.contextmanager
def seated(seating: Seating, *, timeout: float) -> Iterator[tuple[list[Seat], list[Seat]]]:
    """Reserve the bundles, and give them back at the end; yields the seats of ranks and of engines.

    Bundles are taken in the order of (node, device). `timeout`: seconds to wait until the cluster has them free.
    Raises CorerlError where the cluster has too little: what is there, what is asked.
    """
    bundle = {"CPU": seating.cpus_per_bundle}
    if seating.gpus_per_bundle:
        bundle["GPU"] = seating.gpus_per_bundle
    group = placement_group([bundle] * seating.bundles, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=timeout):
            there = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            raise CorerlError(
                f"the cluster has no room: it has {there}, the run asks for {seating.bundles} bundles of {bundle}; "
                "use fewer ranks or engines, or a larger cluster"
            )
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        order = physical_order(nodes, gpus_of_bundles(group, nodes) if seating.gpus_per_bundle else {})

        def seats(places: Sequence[int]) -> list[Seat]:
            return [
                Seat(
                    group,
                    order[place],
                    seating.cpus_per_bundle * seating.share(place),
                    seating.gpus_per_bundle * seating.share(place),
                )
                for place in places
            ]

        yield seats(seating.ranks), seats(seating.engines)
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
