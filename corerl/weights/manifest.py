"""The order in which weights travel: every HF tensor once, in buckets, equal on all ranks of any parallelism."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch


@frozen
class Entry:
    """One HF tensor of a bucket: elements [start, start + numel) of the bucket's flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@frozen
class Bucket:
    """Tensors that travel together, end to end in one contiguous buffer."""

    index: int
    entries: tuple[Entry, ...]

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The bucket's tensors by HF name, as views of its flat buffer [numel]."""
        return {entry.name: flat[entry.start : entry.start + entry.numel].view(entry.shape) for entry in self.entries}


@frozen
class Manifest:
    """Plain data; receivers need nothing else to know what comes next."""

    dtype: str  # of every bucket, as torch names it: float32, bfloat16
    buckets: tuple[Bucket, ...]

    @property
    def names(self) -> list[str]:
        return [entry.name for bucket in self.buckets for entry in bucket.entries]

    @property
    def digest(self) -> str:
        """Equal where sender and receiver speak of the same tensors in the same order."""
        lines = [self.dtype]
        for bucket in self.buckets:
            lines += [f"{bucket.index} {entry.start} {list(entry.shape)} {entry.name}" for entry in bucket.entries]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {entry.name: entry.shape for bucket in self.buckets for entry in bucket.entries}


def build_manifest(shapes: Iterable[tuple[str, tuple[int, ...]]], *, dtype: str, bucket_bytes: int) -> Manifest:
    """Cut (name, shape) pairs, in their order, into buckets of at most `bucket_bytes`; a larger tensor gets its own."""
    item = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    start = 0
    for name, shape in shapes:
        numel = math.prod(shape)
        if entries and (start + numel) * item > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(entries)))
            entries, start = [], 0
        entries.append(Entry(name, tuple(shape), start))
        start += numel
    if entries:
        buckets.append(Bucket(len(buckets), tuple(entries)))
    return Manifest(dtype, tuple(buckets))
