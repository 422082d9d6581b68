"""Reserve bundles of one device each, in physical order, and assign processes to them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import ray
from attrs import evolve, frozen
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from corerl.cluster import nodes
from corerl.cluster.arrangement import Placement
from corerl.cluster.failures import words
from corerl.cluster.forks import Forks
from corerl.cluster.process import started_with
from corerl.errors import CorerlError, InsufficientResources
from corerl.messages import first_line

VISIBLE = "CUDA_VISIBLE_DEVICES"
FREE_WITHIN = 60.0  # seconds for a cluster to free what is asked for
PROBED_WITHIN = 120.0  # seconds for a process to start and see its GPU


@frozen
class Gpu:
    """A GPU, or a MIG part of one, as a process of its machine sees it."""

    place: int  # its number; by a name, its place among those that the machine's CUDA_VISIBLE_DEVICES lists
    name: str  # what CUDA_VISIBLE_DEVICES takes: its number, GPU-... or MIG-...

    @classmethod
    def named(cls, name: str, visible: Sequence[str]) -> Gpu:
        return cls(int(name) if name.isdecimal() else visible.index(name) if name in visible else 0, name)


@frozen
class Bundle:
    """A bundle that Ray has reserved."""

    group: PlacementGroup
    index: int  # in its group
    node: str = ""  # Ray's id of its machine
    gpu: Gpu | None = None
    lost: bool = False  # its machine is gone, and it is on no other


@frozen(eq=False)
class Slot:
    """The place of one process: a fraction of one bundle, or of several adjacent ones."""

    bundles: tuple[Bundle, ...]
    cpus: float  # 0 if the process replaces one that still has the bundle
    gpus: float
    neighbors: int = 1  # bundles on its machine, including its own
    forks: Forks | None = None  # of the placement

    @property
    def node(self) -> str:
        return self.bundles[0].node

    @property
    def lost(self) -> bool:
        return any(bundle.lost for bundle in self.bundles)

    @property
    def devices(self) -> tuple[str, ...]:
        """GPUs of all its bundles, as CUDA_VISIBLE_DEVICES takes them."""
        return tuple(bundle.gpu.name for bundle in self.bundles if bundle.gpu is not None)

    def options(self) -> dict[str, object]:
        """Keyword arguments for a Ray actor's `.options`."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.bundles[0].group, placement_group_bundle_index=self.bundles[0].index
        )
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}

    def environment(self) -> dict[str, str]:
        """What Ray does not set, for a process that requests nothing of its bundles."""
        return {} if self.gpus or not self.devices else {VISIBLE: ",".join(self.devices)}


class ResourcePool(Mapping[str, Sequence[Slot]]):
    """The bundles that a run has reserved, and the slots of each group's processes in them. Free bundles are used in
    (node, device) order, and more are reserved as groups grow."""

    def __init__(self, *, timeout: float, forks: Forks | None = None) -> None:
        """`timeout`: seconds to wait until the cluster has bundles free. `forks` of all processes, also those that are
        added."""
        self._timeout = timeout
        self._forks = forks
        self._bundles: list[Bundle] = []
        self._slots: dict[str, Sequence[Slot]] = {}
        self._gone: set[str] = set()  # lost machines, which Ray may not know of yet

    def __getitem__(self, name: str) -> Sequence[Slot]:
        return self._slots[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def arrange(self, placement: Placement) -> dict[str, Sequence[Slot]]:
        """Slots for all groups of the placement, to be confirmed by `take`.

        Raises CorerlError if the cluster is too small or does not answer, or if the bundles of one process are on
        several machines."""
        if self._bundles:
            self.refresh()  # machines without processes may be gone, and others may have come
        return self.slots(placement, placement.places, self.bundles_for(placement))

    def bundles_for(
        self,
        placement: Placement,
        at: Mapping[int, Bundle] = MappingProxyType({}),
        *,
        held: Collection[Bundle] = (),
    ) -> dict[int, Bundle]:
        """Number in the placement -> bundle. `at` gives some of them; the other numbers get free bundles, none of
        `held`, and more are reserved if there are too few. Raises as `arrange`."""
        vacant = [index for index in range(placement.bundles) if index not in at]
        free = [bundle for bundle in self._bundles if bundle not in held and not bundle.lost]
        if (missing := len(vacant) - len(free)) > 0:
            free += self._reserve(placement.bundle, missing)
        free.sort(key=lambda bundle: (bundle.node, -1 if bundle.gpu is None else bundle.gpu.place, bundle.index))
        return {**at, **dict(zip(vacant, free, strict=False))}

    def slots(
        self, placement: Placement, places: Mapping[str, Sequence[int]], at: Mapping[int, Bundle]
    ) -> dict[str, Sequence[Slot]]:
        """Slots for processes whose first bundles are at these `places` of the placement. Where there are slots
        already, these request nothing from Ray: others still have the bundles. Raises as `arrange`."""
        neighbors = Counter(bundle.node for bundle in self._bundles)

        def slot(name: str, place: int) -> Slot:
            bundles = tuple(at[index] for index in placement.taken(name, place))
            if len({bundle.node for bundle in bundles}) > 1:
                raise CorerlError(
                    f"{name}: one process takes {len(bundles)} bundles, but Ray placed them on several machines; use "
                    "machines whose device count is a multiple of that, or fewer devices per process"
                )
            fraction = 0.0 if self._slots else placement.fraction(place)
            cpus, gpus = placement.bundle["CPU"] * fraction, placement.bundle.get("GPU", 0.0) * fraction
            return Slot(bundles, cpus, gpus, neighbors[bundles[0].node], self._forks)

        return {name: [slot(name, place) for place in own] for name, own in places.items()}

    def take(self, slots: Mapping[str, Sequence[Slot]], *, give_back: bool = True) -> None:
        """Note that the groups' processes are in these slots now. With `give_back`, reservations without any process
        are returned to Ray."""
        self._slots |= slots
        if not give_back:
            return
        used = {bundle.group for slots in self._slots.values() for slot in slots for bundle in slot.bundles}
        for group in {bundle.group for bundle in self._bundles} - used:
            self._bundles = [bundle for bundle in self._bundles if bundle.group != group]
            remove_placement_group(group)

    # ---- machines that are gone -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Find out which machines are gone, and where the cluster has put their bundles. Slots move with them, or are
        `lost`. Raises InsufficientResources if a new GPU does not answer."""
        self._gone |= nodes.gone({bundle.node for bundle in self._bundles if not bundle.lost})
        self.refresh()

    @property
    def bundles(self) -> Sequence[Bundle]:
        return tuple(self._bundles)

    def count(self, bundle: Mapping[str, float]) -> tuple[int, int, int]:
        """How many bundles there are, how many of them have no process, and how many more the cluster has free at most.
        Raises CorerlError if Ray does not answer."""
        try:
            there = {(group, index) for group in self._groups for index in self._nodes(group)}
            free = ray.available_resources()
        except RayError as error:
            raise CorerlError(f"Ray does not report its devices: {first_line(error)}") from error
        used = {(each.group, each.index) for each in self.used(self._slots)}
        more = min((int(free.get(name, 0.0) // amount) for name, amount in bundle.items() if amount), default=0)
        return len(there), len(there - used), more

    def used(self, groups: Iterable[str]) -> set[Bundle]:
        """The bundles of these groups' processes, also of dead ones."""
        return {bundle for name in groups for slot in self._slots[name] for bundle in slot.bundles}

    def refresh(self) -> None:
        """Ask Ray where the bundles are. Raises as `poll`."""
        at: dict[tuple[PlacementGroup, int], Bundle] = {}
        for group in self._groups:
            there = self._nodes(group)
            own = {bundle.index: bundle for bundle in self._bundles if bundle.group == group}
            moved = {index: node for index, node in there.items() if own[index].node != node}
            numbers = gpus_of_bundles(group, moved) if any(own[index].gpu for index in moved) else {}
            for index, bundle in own.items():
                if index in moved:
                    at[group, index] = Bundle(group, index, moved[index], numbers.get(index))
                else:
                    at[group, index] = evolve(bundle, lost=index not in there)
        self._bundles = [at[bundle.group, bundle.index] for bundle in self._bundles]
        neighbors = Counter(bundle.node for bundle in self._bundles)

        def seen(slot: Slot) -> Slot:
            bundles = tuple(at[bundle.group, bundle.index] for bundle in slot.bundles)
            return (
                slot if bundles == slot.bundles else evolve(slot, bundles=bundles, neighbors=neighbors[bundles[0].node])
            )

        self._slots = {name: [seen(slot) for slot in slots] for name, slots in self._slots.items()}

    @property
    def _groups(self) -> list[PlacementGroup]:
        """One for each reservation."""
        return list(dict.fromkeys(bundle.group for bundle in self._bundles))

    def _nodes(self, group: PlacementGroup) -> dict[int, str]:
        """Index of each bundle -> its machine, without bundles that are on none."""
        at: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return {index: node for index, node in at.items() if node and node not in self._gone}

    def release(self) -> None:
        """Give all bundles back."""
        for group in self._groups:
            remove_placement_group(group)

    def _reserve(self, bundle: Mapping[str, float], count: int) -> list[Bundle]:
        group = placement_group([dict(bundle)] * count, strategy="PACK")
        try:
            if not group.wait(timeout_seconds=self._timeout):
                raise _no_room(dict(bundle), count)
            at: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
            numbers = gpus_of_bundles(group, at) if bundle.get("GPU") else {}
        except BaseException:
            remove_placement_group(group)
            raise
        new = [Bundle(group, index, at[index], numbers.get(index)) for index in physical_order(at, numbers)]
        self._bundles += new
        return new


def _no_room(bundle: Mapping[str, float], count: int) -> CorerlError:
    there, free = ray.cluster_resources(), ray.available_resources()
    needed = {name: amount * count for name, amount in bundle.items()}
    listed = ", ".join(
        f"{name} {free.get(name, 0.0):g} free of {there.get(name, 0.0):g}, {amount:g} needed"
        for name, amount in needed.items()
    )
    return CorerlError(
        f"the cluster has no room for {count} bundles of {bundle}: {listed}; "
        "use fewer ranks or engines, or a larger cluster"
    )


@contextlib.contextmanager
def reserved(placement: Placement, *, timeout: float = FREE_WITHIN, release: bool = True) -> Iterator[ResourcePool]:
    """Reserve the bundles and yield the slots of each group; releases the bundles at the end, unless Ray itself ends
    then. `timeout`: seconds to wait until the cluster has them free. Raises like `ResourcePool.arrange`."""
    pool = ResourcePool(timeout=timeout, forks=placement.forks)
    try:
        pool.take(pool.arrange(placement))
        yield pool
    finally:
        if release:
            pool.release()


def physical_order(nodes: Mapping[int, str], gpus: Mapping[int, Gpu]) -> list[int]:
    """Bundles sorted by (node, GPU), so that adjacent ranks are adjacent in the machine; both maps are by bundle."""
    return sorted(nodes, key=lambda bundle: (nodes[bundle], gpus[bundle].place if gpus else 0, bundle))


def gpus_of_bundles(group: PlacementGroup, nodes: Mapping[int, str]) -> dict[int, Gpu]:
    """Bundle -> its GPU, as seen by a probe process on the bundle; `nodes` has each bundle's node. Raises
    InsufficientResources if a probe fails or does not answer in time."""
    probes = {
        index: _gpu_of_bundle.options(**Slot((Bundle(group, index),), 0.0, 1.0).options()).remote() for index in nodes
    }
    found: dict[int, Gpu] = {}
    until = time.monotonic() + PROBED_WITHIN
    for index, probe in probes.items():
        try:
            found[index] = ray.get(probe, timeout=max(0.0, until - time.monotonic()))
        except RayError as error:
            for each in probes.values():
                ray.cancel(each, force=True)
            why = f"no answer within {PROBED_WITHIN:g} s" if isinstance(error, GetTimeoutError) else words(error)
            raise InsufficientResources(
                f"cannot tell which GPU bundle {index} has on node {nodes[index]}: {why}; see Ray's logs there"
            ) from error
    return found


@ray.remote
def _gpu_of_bundle() -> Gpu:
    visible = started_with().get(VISIBLE, "").split(",")  # the machine's Ray's; this process's own was set by Ray
    return Gpu.named(ray.get_runtime_context().get_accelerator_ids()["GPU"][0], visible)
