"""Load, resume and snapshot weights, and measure what is read and allocated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from corerl.backend import StateKey
from corerl.memory import resident_bytes
from corerl.types import (
    MemoryKind,
)
from corerl.weights import Chunk, TensorSource
from corerl_testing.allocations import Allocations
from corerl_testing.harness import (
    Setup,
    State,
    make_worker,
    start,
    state_of,
)


@frozen(kw_only=True)
class Loaded:
    """What loading took, in bytes; parameters are float32."""

    read: int  # from the model's files
    held: int  # parameters on this rank, replicas included
    owned: int  # parameters without replicas
    weights: int  # tensors that forward reads, replicas included
    resident: int  # weights, masters, and gradient memory that exists from the start
    peak: int  # most held at once while loading
    snapshot_peak: int  # most held at once while a snapshot was created and another was loaded
    state: State


class Counted:
    """A source that counts the bytes read from it, in its own dtype."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.bytes_read = 0

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        values = self._source.read(name, offsets, sizes)
        self.bytes_read += values.numel() * values.element_size()
        return values


def load_watched(setup: Setup, resume: str, snapshots: bool) -> Loaded:
    start(setup)[0].shutdown("what is imported or cached once is not the model's")
    worker = make_worker(setup, resume=resume)
    open_source = worker.backend.initial_weights
    sources: list[Counted] = []

    def opened(chunks: Sequence[Chunk]) -> TensorSource:
        sources.append(source := Counted(open_source(chunks)))
        return source

    worker.backend.initial_weights = opened  # type: ignore[method-assign]
    with Allocations() as found:
        worker.init("127.0.0.1", 0)
    chunks = worker.backend.local_state(StateKey.MASTER)
    read = sum(source.bytes_read for source in sources)
    with Allocations() as of_snapshots:
        if snapshots:
            worker.create_snapshot("reference")
            worker.drop_snapshot("reference")
            worker.load_snapshot("reference", "")
    report = Loaded(
        read=read,
        held=sum(chunk.view.numel() * 4 for chunk in chunks),
        owned=sum(chunk.view.numel() * 4 for chunk in chunks if not chunk.replica),
        weights=resident_bytes(worker.backend.tensors(MemoryKind.PARAM)),
        resident=resident_bytes(
            tensor
            for kind in (MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.GRAD)
            for tensor in worker.backend.tensors(kind)
        ),
        peak=found.peak,
        snapshot_peak=of_snapshots.peak,
        state=state_of(worker),
    )
    worker.shutdown("the check is done")
    return report
