"""Define the order in which weights are sent: every HF tensor once, in buckets, the same for any parallelism."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # per element


@frozen
class Entry:
    """One HF tensor of a bucket: [start, start + length) of the bucket's flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    dtype: str = ""  # if the buffer holds bytes; "": the buffer's dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Number of buffer elements that it takes."""
        return self.numel * BYTES[self.dtype] if self.dtype else self.numel


@frozen
class Bucket:
    """Tensors that are sent together, concatenated in one contiguous buffer."""

    index: int
    entries: tuple[Entry, ...]
    stage_rank: int = 0  # the first rank of its tensors' pipeline stage, which sends it if each stage sends its own

    @cached_property
    def numel(self) -> int:
        """Number of elements of its buffer."""
        return max((entry.start + entry.length for entry in self.entries), default=0)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The bucket's tensors by HF name, as views of its flat buffer [numel]."""
        found: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            part = flat[entry.start : entry.start + entry.length]
            if entry.dtype:
                import torch  # not needed by a driver, which reads no weights

                part = part.view(getattr(torch, entry.dtype))
            found[entry.name] = part.view(entry.shape)
        return found


@frozen
class Manifest:
    """All buckets of an update in order, as plain data: everything receivers need to know what comes next."""

    dtype: str  # of every bucket, by torch's name: float32, bfloat16; uint8 if tensors have their own dtypes
    buckets: tuple[Bucket, ...]

    @cached_property
    def largest(self) -> int:
        """Number of elements of the largest bucket."""
        return max((bucket.numel for bucket in self.buckets), default=0)

    @property
    def names(self) -> list[str]:
        return [entry.name for bucket in self.buckets for entry in bucket.entries]

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The first rank of each pipeline stage that has buckets."""
        return tuple(dict.fromkeys(bucket.stage_rank for bucket in self.buckets))

    @cached_property
    def digest(self) -> str:
        """A hash to check that sender and receiver expect the same tensors in the same order."""
        lines = [self.dtype]
        for bucket in self.buckets:
            where = f"{bucket.index} of {bucket.stage_rank}"
            lines += [f"{where} {each.start} {list(each.shape)} {each.dtype} {each.name}" for each in bucket.entries]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {entry.name: entry.shape for bucket in self.buckets for entry in bucket.entries}


def build_manifest(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    *,
    dtype: str,
    bucket_bytes: int = 0,
    stage_ranks: Mapping[str, int] | None = None,
) -> Manifest:
    """Cut (name, shape) pairs, in order, into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket.
    0 means a sixteenth of the total, but from 256 MiB to 1 GiB.

    With `stage_ranks` (name -> first rank of its stage), each bucket is of one stage, and buckets of different stages
    alternate, so that one gathers its next while another sends.
    """
    item, shapes = BYTES[dtype], list(shapes)
    most = bucket_bytes or proportionate_bucket(item * sum(math.prod(shape) for _, shape in shapes))
    by_stage: dict[int, list[list[Entry]]] = {}
    for name, shape in shapes:
        buckets = by_stage.setdefault(stage_ranks[name] if stage_ranks else 0, [[]])
        start = buckets[-1][-1].start + buckets[-1][-1].numel if buckets[-1] else 0
        if buckets[-1] and (start + math.prod(shape)) * item > most:
            buckets.append([])
            start = 0
        buckets[-1].append(Entry(name, tuple(shape), start))
    rounds = itertools.zip_longest(*([(rank, each) for each in own] for rank, own in by_stage.items()))
    in_turns = [turn for each in rounds for turn in each if turn is not None]
    return Manifest(dtype, tuple(Bucket(index, tuple(each), rank) for index, (rank, each) in enumerate(in_turns)))


def proportionate_bucket(total: int) -> int:
    """Bucket bytes such that gathering one bucket overlaps with loading another, without so many buckets that an
    engine's fixed cost for each dominates the update."""
    return min(max(total // 16, 256 * 2**20), 2**30)
