"""Wait for the places of processes whose machine is gone, and count what is left of a run's devices."""

from __future__ import annotations

import time
from collections.abc import Collection

from attrs import define, field

from corerl.cluster import Bundle, ResourcePool

LOOK_SECONDS = 0.5  # between two looks where bundles are


@define(eq=False)
class Places:
    """The bundles of a run, some of which may be on no machine any more."""

    pool: ResourcePool
    _missed: set[Bundle] = field(factory=set, init=False)  # waited for, in vain

    def settle(self, *, within: float) -> None:
        """Wait `within` seconds until the cluster has put the bundles of machines that are gone on others, or so many
        of them that unused ones can take the place of the rest: once for the same bundles, however often this is
        called. Slots are where it has put them, or `lost`."""
        until = time.monotonic() + within
        while self._misses() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            self.pool.refresh()
        self._missed |= self._lost()

    def _misses(self) -> bool:
        """Whether a bundle is lost that was not waited for yet, and not all that are lost can be replaced by others."""
        lost = self._lost()
        # Unused ones may be on several machines, where a process of several bundles cannot be.
        wide = any(slot.lost and len(slot.bundles) > 1 for slots in self.pool.values() for slot in slots)
        return bool(lost - self._missed) and (wide or len(lost) > self.unused)

    def _lost(self) -> set[Bundle]:
        """Those that processes are on, or were."""
        return {bundle for bundle in self.pool.used(self.pool) if bundle.lost}

    def left(self, name: str, *, separate: Collection[str]) -> int:
        """How many bundles there are that are not lost: the group's own if it is one of the `separate` ones, or else
        those that it shares."""
        shares = [name] if name in separate else self.pool.keys() - set(separate)
        return sum(not bundle.lost for bundle in self.pool.used(shares))

    @property
    def unused(self) -> int:
        """How many bundles there are that are not lost and that no process is on."""
        used = self.pool.used(self.pool)
        return sum(not bundle.lost and bundle not in used for bundle in self.pool.bundles)
