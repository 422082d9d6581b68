"""Bundles of one device each, in physical order, and who sits on which."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import ray
from attrs import field, frozen
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from corerl.errors import CorerlError


@frozen(eq=False)
class Seat:
    """A share of one bundle, for one process; or of several, for one that has others beside it."""

    group: PlacementGroup
    bundle: int  # the first
    cpus: float
    gpus: float
    devices: tuple[int, ...] = ()  # the GPUs of all of them, as their machine numbers them
    neighbours: int = 1  # bundles on its machine, its own among them

    def options(self) -> dict[str, object]:
        """Keyword arguments of a Ray actor's `.options`."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle
        )
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}


@frozen(kw_only=True)
class Seating:
    """Where a run's processes go: plain numbers, made from the config before Ray is asked."""

    places: Mapping[str, tuple[int, ...]]  # group of processes -> bundle of each, the first where it has several
    bundles: int
    bundle: Mapping[str, float]  # what each is of a machine, by Ray's names of resources
    widths: Mapping[str, int] = field(factory=dict)  # group -> bundles of each process, where these are several

    def taken(self, name: str, place: int) -> range:
        """The bundles of the process of group `name` that begins at `place`."""
        return range(place, place + self.widths.get(name, 1))

    def share(self, bundle: int) -> float:
        """The part of the bundle that each process on it has."""
        return 1.0 / sum(bundle in self.taken(name, place) for name in self.places for place in self.places[name])

    @property
    def cpus(self) -> float:
        """CPUs of all bundles."""
        return self.bundles * self.bundle["CPU"]


def arrange(
    groups: Mapping[str, int],
    *,
    apart: Collection[str] = (),
    widths: Mapping[str, int] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
) -> Seating:
    """Give each group of so many processes its bundles: those `apart` have their own, all others share the same ones,
    as many as the largest group needs, and each group spread evenly over them.

    A bundle is `cpus`, `gpus` and custom `resources`: what one process takes of a machine where it is alone. `widths`
    names groups whose processes take several bundles each, side by side.
    """
    widths = {name: width for name, width in (widths or {}).items() if width > 1}
    places: dict[str, tuple[int, ...]] = {}
    shared = bundles = max((n * widths.get(name, 1) for name, n in groups.items() if name not in apart), default=0)
    for name, count in groups.items():
        width = widths.get(name, 1)
        if name in apart:
            places[name] = tuple(range(bundles, bundles + count * width, width))
            bundles += count * width
        else:
            # A process of several begins at a multiple of them: so it has its machine's neighbours, and no two overlap.
            places[name] = tuple(index * (shared // width) // count * width for index in range(count))
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **(resources or {})}
    return Seating(places=places, bundles=bundles, bundle=bundle, widths=widths)


@contextlib.contextmanager
def seated(seating: Seating, *, timeout: float) -> Iterator[dict[str, list[Seat]]]:
    """Reserve the bundles, and give them back at the end; yields the seats of each group.

    Bundles are taken in the order of (node, device). `timeout`: seconds to wait until the cluster has them free.
    Raises CorerlError where the cluster has too little: what is there, what is asked; and where the bundles of one
    process are on several machines.
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
        numbers = gpus_of_bundles(group, nodes) if gpus else {}
        order = physical_order(nodes, numbers)
        neighbours = Counter(nodes.values())
        seats: dict[str, list[Seat]] = {name: [] for name in seating.places}
        for name, places in seating.places.items():
            for place in places:
                taken = [order[index] for index in seating.taken(name, place)]
                if len({nodes[index] for index in taken}) > 1:
                    raise CorerlError(
                        f"{name}: one of them takes {len(taken)} bundles, and Ray has them on several machines; use "
                        "machines whose devices divide by that, or fewer for each"
                    )
                share = seating.share(place)
                devices = tuple(numbers[index] for index in taken) if numbers else ()
                beside = neighbours[nodes[taken[0]]]
                seats[name].append(Seat(group, taken[0], bundle["CPU"] * share, gpus * share, devices, beside))
        yield seats
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
