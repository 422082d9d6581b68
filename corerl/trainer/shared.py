"""Put a rollout batch into the object store in pieces: each node pulls only what its ranks read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import evolve

from corerl.cluster.runtime import put
from corerl.types import IntArray, SampleBatch


class SharedBatch:
    """Samples that several verbs of one group or of several read. What they read alike is put once."""

    def __init__(self, samples: SampleBatch) -> None:
        self.samples = samples
        self._pieces: dict[tuple[frozenset[str], bytes], Any] = {}  # references, by columns and rows

    def piece(self, rows: IntArray | None, columns: Iterable[str]) -> Any:
        """A reference to the samples `rows` [n], None: all, with the `columns` that they have. Raises
        CorerlError if neither the object store nor the disk has room."""
        wanted = frozenset(columns).intersection(self.samples.columns)
        key = (wanted, b"all" if rows is None else rows.tobytes())
        if key not in self._pieces:
            chosen = {name: column for name, column in self.samples.columns.items() if name in wanted}
            samples = evolve(self.samples, columns=chosen)
            self._pieces[key] = put(samples if rows is None else samples.take(rows))
        return self._pieces[key]


def share(samples: SampleBatch) -> SharedBatch:
    """The samples for several verbs, of any groups, which then read one copy in the object store of each node. It is
    put there when a verb needs it, and gone with this object."""
    return SharedBatch(samples)
