"""Named weight snapshots in host memory: a reference policy is a snapshot, not a second model on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from attrs import evolve, frozen

from corerl.errors import WrongState
from corerl.memory.pool import ALIGNMENT, HostMemory, Piece, cut
from corerl.weights.chunks import Chunk, TensorSource, fill

T = TypeVar("T")


@frozen(eq=False)
class Copies:
    """One host tensor for each chunk, and the memory behind them."""

    tensors: list[torch.Tensor]
    pieces: list[Piece]


class Snapshots:
    """Snapshots of this rank's own chunks. Chunks must be given in the same order every time, replicas included, since
    a swap must reach every view."""

    def __init__(self, host: HostMemory | None = None) -> None:
        """`host` provides the memory: the host memory of a rank's sleep has room for a swap while the rank is awake."""
        self._host = host or HostMemory()
        self._kept: dict[str, Copies] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._kept)

    def create(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Keep the views' current contents as snapshot `name`, replacing any earlier one."""
        with self._room(chunks) as copies:
            _save(chunks, copies.tensors)
            self._keep(name, copies)

    def load(self, name: str, chunks: Sequence[Chunk], source: TensorSource) -> int:
        """Keep `source`'s tensors in the views' dtypes, reading only this rank's boxes; returns the bytes read.

        The views are not touched. Raises ModelError if the source does not fit; an earlier snapshot is then kept.
        """
        return self.make(name, chunks, lambda boxes: fill(boxes, source, what=f"the source of snapshot {name!r}"))

    def make(self, name: str, chunks: Sequence[Chunk], write: Callable[[Sequence[Chunk]], T]) -> T:
        """Keep what `write` writes into chunks of these boxes as snapshot `name`; returns what it returns."""
        with self._room(chunks) as copies:
            made = write(_boxes(chunks, copies))
            self._keep(name, copies)
        return made

    def chunks(self, name: str, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The snapshot as chunks, in host memory."""
        return _boxes(chunks, self._get(name))

    def drop(self, name: str) -> None:
        self._get(name)
        self._host.give_back(self._kept.pop(name).pieces)

    @contextlib.contextmanager
    def swapped(self, name: str, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Run the block with the snapshot in the views; afterwards, even on an error, restore their own bits."""
        kept = self._get(name)
        with self._room(chunks) as previous:
            _save(chunks, previous.tensors)
            try:
                _load(chunks, kept.tensors)
                yield
            finally:
                _load(chunks, previous.tensors)

    def _get(self, name: str) -> Copies:
        if name not in self._kept:
            known = ", ".join(self.names) or "none"
            raise WrongState(f"no snapshot {name!r}; known: {known}; create or load it first")
        return self._kept[name]

    def _keep(self, name: str, copies: Copies) -> None:
        if name in self._kept:
            self.drop(name)
        self._kept[name] = copies

    @contextlib.contextmanager
    def _room(self, chunks: Sequence[Chunk]) -> Iterator[Copies]:
        """Uninitialized host tensors for the chunks; released at the end unless they were kept."""
        sizes = [-(-chunk.view.nbytes // ALIGNMENT) * ALIGNMENT for chunk in chunks]
        pieces = self._host.take(sum(sizes))
        copies = Copies([_shaped(*each) for each in zip(cut(pieces, sizes), chunks, strict=True)], pieces)
        try:
            yield copies
        finally:
            if copies not in self._kept.values():
                self._host.give_back(pieces)


def _boxes(chunks: Sequence[Chunk], copies: Copies) -> list[Chunk]:
    return [evolve(chunk, view=host) for chunk, host in zip(chunks, copies.tensors, strict=True)]


def _shaped(slices: Sequence[torch.Tensor], chunk: Chunk) -> torch.Tensor:
    """The memory as a tensor of the chunk's shape and dtype. The few chunks that would span two segments get separate
    memory."""
    shape, dtype = tuple(chunk.sizes), chunk.view.dtype
    if len(slices) != 1:
        return torch.empty(shape, dtype=dtype)
    return slices[0][: chunk.view.nbytes].view(dtype).view(shape)


def _save(chunks: Sequence[Chunk], hosts: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for chunk, host in zip(chunks, hosts, strict=True):
            host.copy_(chunk.view, non_blocking=True)
    _synchronize(chunks)


def _load(chunks: Sequence[Chunk], hosts: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for chunk, host in zip(chunks, hosts, strict=True):
            chunk.view.copy_(host, non_blocking=True)
    _synchronize(chunks)


def _synchronize(chunks: Sequence[Chunk]) -> None:
    for device in {chunk.view.device for chunk in chunks}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
