"""Named copies of a rank's weights in host memory: a reference policy is one, not a second model on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from attrs import evolve, frozen

from corerl.errors import WrongState
from corerl.memory.pool import ALIGNMENT, HostMemory, Piece, cut
from corerl.weights.chunks import Chunk, TensorSource, fill


@frozen(eq=False)
class Saved:
    """One host tensor for each chunk, and the memory behind them."""

    tensors: list[torch.Tensor]
    pieces: list[Piece]


class HostWeights:
    """Snapshots of this rank's own chunks. Chunks must be given in the same order every time, replicas included, since
    a swap must reach every view."""

    def __init__(self, host: HostMemory | None = None) -> None:
        """`host` provides the memory: the host memory of a rank's sleep has room for a swap while the rank is awake."""
        self._host = host or HostMemory()
        self._kept: dict[str, Saved] = {}

    def save(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Keep the views' current contents as snapshot `name`, replacing any earlier one."""
        with self._room(chunks) as saved:
            _copy(zip(saved.tensors, _views(chunks), strict=True))
            self._keep(name, saved)

    def load(self, name: str, chunks: Sequence[Chunk], source: TensorSource) -> int:
        """Keep `source`'s tensors in the views' dtypes, reading only this rank's boxes; returns the bytes read.

        The views are not touched. Raises ModelError if the source does not fit; an earlier snapshot is then kept.
        """
        with self._room(chunks) as saved:
            boxes = [evolve(chunk, view=host) for chunk, host in zip(chunks, saved.tensors, strict=True)]
            read = fill(boxes, source, what=f"the source of snapshot {name!r}")
            self._keep(name, saved)
        return read

    def drop(self, name: str) -> None:
        self._host.give_back(self._get(name).pieces)
        del self._kept[name]

    @contextlib.contextmanager
    def swapped(self, name: str, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Run the block with the snapshot in the views; afterwards, even on an error, restore their own bits."""
        kept = self._get(name)
        with self._room(chunks) as previous:
            _copy(zip(previous.tensors, _views(chunks), strict=True))
            try:
                _copy(zip(_views(chunks), kept.tensors, strict=True))
                yield
            finally:
                _copy(zip(_views(chunks), previous.tensors, strict=True))

    def _get(self, name: str) -> Saved:
        if name not in self._kept:
            known = ", ".join(sorted(self._kept)) or "none"
            raise WrongState(f"no snapshot {name!r}; known: {known}; create or load it first")
        return self._kept[name]

    def _keep(self, name: str, saved: Saved) -> None:
        if name in self._kept:
            self.drop(name)
        self._kept[name] = saved

    @contextlib.contextmanager
    def _room(self, chunks: Sequence[Chunk]) -> Iterator[Saved]:
        """Uninitialized host tensors for the chunks; released at the end unless they were kept."""
        sizes = [-(-chunk.view.nbytes // ALIGNMENT) * ALIGNMENT for chunk in chunks]
        pieces = self._host.take(sum(sizes))
        saved = Saved([_shaped(*each) for each in zip(cut(pieces, sizes), chunks, strict=True)], pieces)
        try:
            yield saved
        finally:
            if saved not in self._kept.values():
                self._host.give_back(pieces)


def _shaped(slices: Sequence[torch.Tensor], chunk: Chunk) -> torch.Tensor:
    """The memory as a tensor of the chunk's shape and dtype. The few chunks that would span two segments get separate
    memory."""
    shape, dtype = tuple(chunk.sizes), chunk.view.dtype
    if len(slices) != 1:
        return torch.empty(shape, dtype=dtype)
    return slices[0][: chunk.view.nbytes].view(dtype).view(shape)


def _views(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    return [chunk.view for chunk in chunks]


@torch.no_grad()
def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair over the first; returns when all copies are done."""
    devices = set()
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
        devices |= {target.device, source.device}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
