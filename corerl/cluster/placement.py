"""Reserve bundles of one device each, in physical order, and assign processes to them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import ray
from attrs import field, frozen
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from corerl.cluster import services
from corerl.cluster.deaths import cause
from corerl.errors import CorerlError

PROBED_WITHIN = 120.0  # seconds for a process to start and see its GPU


@frozen(eq=False)
class Slot:
    """The place of one process: a share of one bundle, or of several adjacent ones."""

    group: PlacementGroup
    bundle: int  # the first
    cpus: float
    gpus: float
    devices: tuple[int, ...] = ()  # GPUs of all its bundles, by the machine's numbering
    neighbors: int = 1  # bundles on its machine, including its own
    node: str = ""  # Ray's id of its machine

    def options(self) -> dict[str, object]:
        """Keyword arguments for a Ray actor's `.options`."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle
        )
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}


@frozen(kw_only=True)
class Placement:
    """The placement of a run's processes, as plain numbers computed before Ray starts."""

    places: Mapping[str, tuple[int, ...]]  # group of processes -> each one's (first) bundle
    bundles: int
    bundle: Mapping[str, float]  # resources of one bundle, by Ray's names
    widths: Mapping[str, int] = field(factory=dict)  # group -> bundles per process, if more than one

    def taken(self, name: str, place: int) -> range:
        """The bundles of group `name`'s process whose first bundle is `place`."""
        return range(place, place + self.widths.get(name, 1))

    def share(self, bundle: int) -> float:
        """The fraction of the bundle that each process on it gets."""
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
) -> Placement:
    """Assign bundles to `groups` (name -> number of processes). Groups in `apart` get their own; all others share as
    many bundles as the largest of them needs, each spread evenly over these.

    A bundle is `cpus`, `gpus` and custom `resources`: what a process needs if it is alone on it. `widths` names groups
    whose processes take several adjacent bundles each.
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
            # A wide process starts at a multiple of its width, so that it stays on one machine and none overlap.
            places[name] = tuple(index * (shared // width) // count * width for index in range(count))
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **(resources or {})}
    return Placement(places=places, bundles=bundles, bundle=bundle, widths=widths)


@contextlib.contextmanager
def reserved(placement: Placement, *, timeout: float, release: bool = True) -> Iterator[dict[str, list[Slot]]]:
    """Reserve the bundles and yield the slots of each group; releases the bundles at the end, unless
    Ray itself ends then.

    Bundles are used in (node, device) order. `timeout`: seconds to wait until the cluster has them free. Raises
    CorerlError if the cluster is too small or does not answer, or if the bundles of one process are on several
    machines.
    """
    bundle = dict(placement.bundle)
    gpus = bundle.get("GPU", 0.0)
    group = placement_group([bundle] * placement.bundles, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=timeout):
            there, free = ray.cluster_resources(), ray.available_resources()
            needed = {name: amount * placement.bundles for name, amount in bundle.items()}
            listed = ", ".join(
                f"{name} {free.get(name, 0.0):g} free of {there.get(name, 0.0):g}, {amount:g} needed"
                for name, amount in needed.items()
            )
            raise CorerlError(
                f"the cluster has no room for {placement.bundles} bundles of {bundle}: {listed}; "
                "use fewer ranks or engines, or a larger cluster"
            )
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        numbers = gpus_of_bundles(group, nodes) if gpus else {}
        order = physical_order(nodes, numbers)
        neighbors = Counter(nodes.values())
        slots: dict[str, list[Slot]] = {name: [] for name in placement.places}
        for name, places in placement.places.items():
            for place in places:
                taken = [order[index] for index in placement.taken(name, place)]
                if len({nodes[index] for index in taken}) > 1:
                    raise CorerlError(
                        f"{name}: one process takes {len(taken)} bundles, but Ray placed them on several machines; use "
                        "machines whose device count is a multiple of that, or fewer devices per process"
                    )
                share = placement.share(place)
                devices = tuple(numbers[index] for index in taken) if numbers else ()
                node = nodes[taken[0]]
                cpus, beside = bundle["CPU"] * share, neighbors[node]
                slots[name].append(Slot(group, taken[0], cpus, gpus * share, devices, beside, node))
        yield slots
    finally:
        if release and services.gcs_lives():  # else this would wait until Ray ends this process
            remove_placement_group(group)


def physical_order(nodes: Mapping[int, str], gpus: Mapping[int, int]) -> list[int]:
    """Bundles sorted by (node, GPU), so that adjacent ranks are adjacent in the machine; both maps are by bundle."""
    return sorted(nodes, key=lambda bundle: (nodes[bundle], gpus.get(bundle, 0), bundle))


def gpus_of_bundles(group: PlacementGroup, nodes: Mapping[int, str]) -> dict[int, int]:
    """Bundle -> GPU index on its machine, as seen by a probe process on the bundle; `nodes` has each bundle's node.
    Raises CorerlError if a probe fails, or does not answer in time."""
    probes = {index: _gpu_of_bundle.options(**Slot(group, index, 0.0, 1.0).options()).remote() for index in nodes}
    found: dict[int, int] = {}
    for index, probe in probes.items():
        try:
            found[index] = ray.get(probe, timeout=PROBED_WITHIN)
        except RayError as error:
            why = f"no answer within {PROBED_WITHIN:g} s" if isinstance(error, GetTimeoutError) else cause(error)
            raise CorerlError(
                f"cannot tell which GPU bundle {index} has on node {nodes[index]}: {why}; see Ray's logs on that "
                "machine, and start again"
            ) from error
    return found


@ray.remote
def _gpu_of_bundle() -> int:
    return int(ray.get_gpu_ids()[0])
