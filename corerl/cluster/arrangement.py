"""How processes share bundles of one device each, as plain numbers: checking a config needs no Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import field, frozen

from corerl.cluster.forks import Forks


@frozen(kw_only=True)
class Placement:
    """The placement of a run's processes, as plain numbers computed before Ray starts."""

    places: Mapping[str, tuple[int, ...]]  # group of processes -> each one's (first) bundle
    bundles: int
    bundle: Mapping[str, float]  # resources of one bundle, by Ray's names
    widths: Mapping[str, int] = field(factory=dict)  # group -> bundles per process, if more than one
    separate: Collection[str] = ()  # groups that share their bundles with no other
    forks: Forks | None = None  # how processes start; None: as Ray starts them

    def taken(self, name: str, place: int) -> range:
        """The bundles of group `name`'s process whose first bundle is `place`."""
        return range(place, place + self.widths.get(name, 1))

    def fraction(self, bundle: int) -> float:
        """The fraction of the bundle that each process on it gets."""
        return 1.0 / sum(bundle in self.taken(name, place) for name in self.places for place in self.places[name])

    @property
    def cpus(self) -> float:
        """CPUs of all bundles."""
        return self.bundles * self.bundle["CPU"]


def arrange(
    groups: Mapping[str, int],
    *,
    own_devices: Collection[str] = (),
    widths: Mapping[str, int] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
) -> Placement:
    """Assign bundles to `groups` (name -> number of processes). Groups in `own_devices` get their own; all others share
    as many bundles as the largest of them needs, each spread evenly over these.

    A bundle is `cpus`, `gpus` and custom `resources`: what a process needs if it is alone on it. `widths` names groups
    whose processes take several adjacent bundles each.
    """
    widths = {name: width for name, width in (widths or {}).items() if width > 1}
    places: dict[str, tuple[int, ...]] = {}
    colocated = bundles = max(
        (n * widths.get(name, 1) for name, n in groups.items() if name not in own_devices), default=0
    )
    for name, count in groups.items():
        width = widths.get(name, 1)
        if name in own_devices:
            places[name] = tuple(range(bundles, bundles + count * width, width))
            bundles += count * width
        else:
            # A wide process starts at a multiple of its width, so that it stays on one machine and none overlap.
            places[name] = tuple(index * (colocated // width) // count * width for index in range(count))
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **(resources or {})}
    return Placement(places=places, bundles=bundles, bundle=bundle, widths=widths, separate=tuple(own_devices))
