"""Weights kept by name in host memory: a reference policy is one of these, not a second model on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from attrs import evolve

from corerl.errors import WrongState
from corerl.weights.chunks import Chunk, TensorSource, fill


class Snapshots:
    """Each rank keeps its own chunks only. Chunks must be given in the same order every time; replicas count like
    others, since a swap has to reach every view."""

    def __init__(self) -> None:
        self._kept: dict[str, list[torch.Tensor]] = {}  # per name one host copy for each chunk

    @property
    def names(self) -> list[str]:
        return sorted(self._kept)

    def create(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Keep what the views hold now; an earlier snapshot of that name is replaced."""
        kept = _host_copies(chunks)
        _save(chunks, kept)
        self._kept[name] = kept

    def load(self, name: str, chunks: Sequence[Chunk], source: TensorSource) -> int:
        """Keep `source`'s tensors in the views' dtypes, reading this rank's boxes alone; returns the bytes read.

        The views are not touched. Raises ModelError where the source does not fit; an earlier snapshot then stays.
        """
        kept = _host_copies(chunks)
        boxes = [evolve(chunk, view=host) for chunk, host in zip(chunks, kept, strict=True)]
        read = fill(boxes, source, what=f"the source of snapshot {name!r}")
        self._kept[name] = kept
        return read

    def drop(self, name: str) -> None:
        self._get(name)
        del self._kept[name]

    @contextlib.contextmanager
    def swapped(self, name: str, chunks: Sequence[Chunk]) -> Iterator[None]:
        """The views hold the snapshot; on leaving, whatever happened, their own bits again."""
        kept = self._get(name)
        previous = _host_copies(chunks)
        _save(chunks, previous)
        try:
            _load(chunks, kept)
            yield
        finally:
            _load(chunks, previous)

    def _get(self, name: str) -> list[torch.Tensor]:
        if name not in self._kept:
            known = ", ".join(self.names) or "none"
            raise WrongState(f"no snapshot {name!r}; known: {known}; create or load it first")
        return self._kept[name]


def _host_copies(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """One uninitialised host tensor for each view, pinned where the view is on a GPU."""
    return [
        torch.empty(tuple(chunk.sizes), dtype=chunk.view.dtype, pin_memory=chunk.view.device.type == "cuda")
        for chunk in chunks
    ]


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
