"""Slots for the groups of another placement, where some processes stay in theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from corerl.cluster import Bundle, Placement, ResourcePool, Slot
from corerl.errors import CorerlError


def arranged(pool: ResourcePool, placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
    """Slots for all groups of the placement, to be confirmed by `pool.take`. The first processes of the groups in
    `staying`, so many, keep theirs; new ones request nothing from Ray, since others still have the bundles.

    Raises CorerlError as `pool.arrange` does, and if a process that was to stay has no machine any more."""
    pool.refresh()  # machines without processes may be gone, and others may have come
    kept = {name: list(pool[name][:count]) for name, count in staying.items()}
    if any(slot.lost for slots in kept.values() for slot in slots):
        raise CorerlError("a machine with processes that were to stay is gone; ask again once they are replaced")
    return _with_kept(pool, placement, kept)


def without_lost(pool: ResourcePool, placement: Placement, staying: Collection[str]) -> dict[str, Sequence[Slot]]:
    """Slots for all groups of a placement that fits into the bundles that are left. Processes of the groups in
    `staying` keep theirs, unless these are lost. Raises as `arranged`."""
    wanted = {name: pool[name][: len(placement.places[name])] for name in staying}
    living = {name: [slot for slot in slots if not slot.lost] for name, slots in wanted.items()}
    found = _with_kept(pool, placement, living)
    for name, slots in wanted.items():
        others = iter(found[name][len(living[name]) :])
        found[name] = [next(others) if slot.lost else slot for slot in slots]
    return found


def _with_kept(pool: ResourcePool, placement: Placement, kept: Mapping[str, list[Slot]]) -> dict[str, Sequence[Slot]]:
    held = {bundle for slots in kept.values() for slot in slots for bundle in slot.bundles}
    at = pool.bundles_for(placement, _kept_at(placement, kept), held=held)
    new = pool.slots(placement, {name: _left(placement, name, at, kept.get(name, ())) for name in placement.places}, at)
    return {name: [*kept.get(name, ()), *slots] for name, slots in new.items()}


def _kept_at(placement: Placement, kept: Mapping[str, Sequence[Slot]]) -> dict[int, Bundle]:
    """Number in the placement -> bundle of a process that stays: its own numbers, or others if another process has
    them. The widest come first, since all of their bundles must stay adjacent, at a multiple of their width."""
    at: dict[int, Bundle] = {}
    elsewhere: list[tuple[Bundle, ...]] = []
    for name in sorted(kept, key=lambda name: -placement.widths.get(name, 1)):
        for place, slot in zip(placement.places[name], kept[name], strict=False):
            own = dict(zip(placement.taken(name, place), slot.bundles, strict=True))
            if any(bundle in at.values() for bundle in slot.bundles):
                elsewhere += [(bundle,) for bundle in slot.bundles]
            elif own.keys() & at.keys():
                elsewhere.append(slot.bundles)
            else:
                at |= own
    # Those below are of groups that share.
    shared = min((place for name in placement.separate for place in placement.places[name]), default=placement.bundles)
    for bundles in elsewhere:
        if any(bundle in at.values() for bundle in bundles):
            continue
        width = len(bundles)
        blocks = (range(start, start + width) for start in range(0, shared - width + 1, width))
        at |= dict(zip(next((block for block in blocks if not at.keys() & set(block)), ()), bundles, strict=False))
    return at


def _left(placement: Placement, name: str, at: Mapping[int, Bundle], own: Sequence[Slot]) -> Sequence[int]:
    """Places for a group's new processes, without bundles of its own that stay."""
    taken = {bundle for slot in own for bundle in slot.bundles}
    count = len(placement.places[name]) - len(own)
    alone = [
        place
        for place in placement.places[name]
        if not any(at[index] in taken for index in placement.taken(name, place))
    ]
    if len(alone) < count:
        raise CorerlError(
            f"{name}: no place for {count} more processes of {placement.widths.get(name, 1)} adjacent bundles, only "
            f"for {len(alone)}, where the others stay; use another number of them, or start the run again"
        )
    return alone[:count]
