"""Gather full Hugging Face tensors, one bucket at a time, from the boxes that the ranks hold.

A chunk is a box of a tensor, with a view of the rank's memory. The boxes that a rank has of a bucket, end to end, are
its part. Boxes of one kind at equal distances, the pieces of a run, are copied at once; larger ones are runs alone."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from corerl.errors import ContractError
from corerl.weights.chunks import Box, Chunk, holes, runs_of, without_numbers
from corerl.weights.manifest import Bucket

Shape: TypeAlias = tuple[int, ...]
NamedBox: TypeAlias = tuple[str, Shape, Box]  # a tensor's name and whole shape, and a box of it
CopyKind: TypeAlias = tuple[Shape, Shape, str | int]  # equal for boxes to copy at once: sizes, tensor's strides, a key
Parts: TypeAlias = dict[int, torch.Tensor | list[torch.Tensor]]  # ranks' boxes: as a part, or as views of memory

# If all ranks receive, and padding all parts to equal size would take more than this many buckets of memory (as with
# pipeline stages, where one rank holds the whole bucket), the parts are broadcast one by one, without padding.
PADDED_BUCKETS = 2
# Boxes of up to so many elements, such as the adapters of experts, are copied many at once: to launch a copy takes
# longer than to make it. Larger ones are copied one by one, as plain memory.
SMALL = 2**19


@frozen
class BoxRun:
    """Boxes [*sizes] of one rank, at equal distances in its part and in the bucket; most often a single one."""

    pieces: list[int]  # their positions among the rank's boxes
    sizes: Shape
    start: int  # of the first, in elements of the rank's part, in which each is contiguous
    start_step: int
    at: int  # of the first, in elements of the bucket
    at_step: int
    strides: Shape  # of its tensor in the bucket

    def in_part(self, part: torch.Tensor) -> torch.Tensor:
        """A view [n, *sizes] of them in the rank's part."""
        strides = (self.start_step, *_strides(self.sizes))
        return part.as_strided((len(self.pieces), *self.sizes), strides, part.storage_offset() + self.start)

    def in_bucket(self, out: torch.Tensor) -> torch.Tensor:
        """Their places as a view [n, *sizes] of the bucket [bucket.numel]."""
        strides = (self.at_step, *self.strides)
        return out.as_strided((len(self.pieces), *self.sizes), strides, out.storage_offset() + self.at)

    def copy(self, views: Sequence[torch.Tensor], to: torch.Tensor) -> None:
        """Copy these of a rank's boxes, each somewhere in its memory, to such a view."""
        own = [views[piece] for piece in self.pieces]
        if (at_once := _stacked(own)) is not None:
            to.copy_(at_once)
        else:
            for place, view in zip(to, own, strict=True):
                place.copy_(view)


@frozen
class BucketLayout:
    """How one bucket is gathered; equal on all ranks except for `own`."""

    runs: list[list[BoxRun]]  # by rank
    lengths: list[int]  # elements of each rank's part
    own: list[int]  # this rank's boxes, as positions in the chunks that the plan was built from


@define(kw_only=True)
class GatherPlan:
    """Gathers buckets from all ranks. Built once, collectively; `gather` needs about two buckets besides `out`."""

    shapes: list[tuple[str, Shape]]  # every HF tensor, in the same order on all ranks: first appearance, rank by rank
    stage_ranks: dict[str, int]  # HF tensor -> the first rank of its pipeline stage
    _boxes: list[list[NamedBox]]  # that ranks send, by rank
    _positions: list[int]  # this rank's boxes, as positions in the chunks
    _group: dist.ProcessGroup | None
    _rank: int
    _all_whole: bool  # every rank holds every tensor whole and reads its own; `_boxes` then has only its own
    _by_name: dict[str, list[tuple[int, int]]] = field(init=False)  # name -> (rank, index of the box)
    _layouts: dict[Bucket, BucketLayout] = field(factory=dict, init=False)
    _kept: dict[str, torch.Tensor] = field(factory=dict, init=False)  # memory reused from bucket to bucket

    def __attrs_post_init__(self) -> None:
        self._by_name = {name: [] for name, _ in self.shapes}
        for rank, boxes in enumerate(self._boxes):
            for index, (name, _, _) in enumerate(boxes):
                self._by_name[name].append((rank, index))

    @classmethod
    def build(cls, chunks: Sequence[Chunk], group: dist.ProcessGroup | None) -> GatherPlan:
        """Called on every rank of `group` (None: a single process, without torch.distributed).

        Raises ContractError, on all ranks alike, if the boxes do not cover every tensor exactly once.
        """
        boxes: list[NamedBox] = [(chunk.name, tuple(chunk.shape), chunk.box) for chunk in chunks]
        own = [position for position, chunk in enumerate(chunks) if not chunk.replica]
        # A rank with faulty chunks reports them instead of raising alone, since the others would wait for it.
        copies = sorted({chunk.name for chunk in chunks if chunk.replica})
        mine = (_fault(chunks), _whole(boxes), copies, [boxes[position] for position in own])
        rank, ranks = (0, [mine]) if group is None else (dist.get_rank(group), all_gather_json(mine, group))
        faults, wholes, copied, boxes_of = zip(*ranks, strict=True)
        for other, fault in enumerate(faults):
            if fault:
                raise ContractError(f"the chunks of rank {other} are wrong: {fault}")
        by_rank: list[list[NamedBox]] = [  # JSON has made lists of tuples
            [(name, tuple(shape), (tuple(offsets), tuple(sizes))) for name, shape, (offsets, sizes) in each]
            for each in boxes_of
        ]
        shapes = _checked_shapes(by_rank)
        names = ((name for name, _, _ in each) for each in by_rank)
        stages = first_of_stages([{*held, *others} for held, others in zip(names, copied, strict=True)])
        all_whole = all(whole == len(shapes) for whole in wholes)
        if all_whole:
            by_rank = [boxes if other == rank else [] for other in range(len(by_rank))]
            own = list(range(len(chunks)))
        return cls(
            shapes=shapes, stage_ranks=stages, boxes=by_rank, positions=own, group=group, rank=rank, all_whole=all_whole
        )

    def gather(
        self,
        bucket: Bucket,
        out: torch.Tensor | None = None,
        *,
        chunks: Sequence[Chunk],
        root: int | None,
        dtype: torch.dtype,
        device: torch.device,  # of the parts that travel, wherever the chunks are; unless `out` has another
    ) -> torch.Tensor | None:
        """Gather the whole bucket [bucket.numel] in `dtype`, on `root` (a rank of the group; None: on every rank).

        Called on every rank, with the chunks that the plan was built from, or fresh ones of the same boxes in the same
        order. Writes to `out` [bucket.numel], if given. Returns None on ranks that do not receive.
        """
        layout = self._layouts.get(bucket) or self._layouts.setdefault(bucket, self._layout(bucket))
        device = device if out is None else out.device
        if root is not None and root != self._rank:
            out = None
        elif out is None:
            out = torch.empty(bucket.numel, dtype=dtype, device=device)
        with torch.no_grad():
            if self._all_whole:
                parts: Parts = {self._rank: self._own(layout, chunks)}
            elif root is None:
                parts = self._to_all(layout, bucket, chunks, dtype, device)
            else:
                parts = self._to_root(layout, chunks, root, dtype, device)
            if out is not None:
                for rank, part in parts.items():
                    for run in layout.runs[rank]:
                        if isinstance(part, torch.Tensor):
                            run.in_bucket(out).copy_(run.in_part(part))
                        else:
                            run.copy(part, run.in_bucket(out))
        return out

    def memory(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Scratch memory [numel] for this use, valid until the next call for it; its contents are undefined."""
        kept = self._kept.get(use)
        if kept is None or kept.numel() < numel or (kept.dtype, kept.device) != (dtype, device):
            kept = self._kept[use] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]

    def release(self) -> None:
        """Free the scratch memory on devices. Host memory is kept for the next update: first touching its pages costs
        several times as much as writing to them."""
        self._kept = {use: kept for use, kept in self._kept.items() if kept.device.type == "cpu"}

    def _layout(self, bucket: Bucket) -> BucketLayout:
        found: list[list[tuple[CopyKind, tuple[int, int]]]] = [[] for _ in self._boxes]
        lengths = [0] * len(self._boxes)
        own: list[int] = []
        for entry in bucket.entries:
            strides, name = _strides(entry.shape), without_numbers(entry.name)
            for rank, index in self._by_name[entry.name]:
                offsets, sizes = self._boxes[rank][index][2]
                at = entry.start + sum(map(operator.mul, offsets, strides))
                kind = (sizes, strides, name if math.prod(sizes) <= SMALL else len(found[rank]))  # a number: alone
                found[rank].append((kind, (lengths[rank], at)))
                lengths[rank] += math.prod(sizes)
                if rank == self._rank:
                    own.append(self._positions[index])
        return BucketLayout([_runs(each) for each in found], lengths, own)

    def _own(self, layout: BucketLayout, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        return [chunks[position].view for position in layout.own]

    def _packed(
        self, layout: BucketLayout, chunks: Sequence[Chunk], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This rank's boxes, cast and concatenated into [numel]; the tail may be padding."""
        part = self.memory("part", numel, dtype, device)
        views = self._own(layout, chunks)
        for run in layout.runs[self._rank]:
            run.copy(views, run.in_part(part))
        return part

    def _to_root(
        self, layout: BucketLayout, chunks: Sequence[Chunk], root: int, dtype: torch.dtype, device: torch.device
    ) -> Parts:
        """All ranks' boxes, on `root`: its own directly, the others' received as parts of their own lengths."""
        if root != self._rank:
            if length := layout.lengths[self._rank]:
                part = self._packed(layout, chunks, length, dtype, device)
                _exchange([dist.P2POp(dist.isend, part, group=self._group, group_peer=root)])
            return {}
        others = {
            rank: self.memory(f"from {rank}", length, dtype, device)
            for rank, length in enumerate(layout.lengths)
            if length and rank != root
        }
        _exchange([dist.P2POp(dist.irecv, part, group=self._group, group_peer=rank) for rank, part in others.items()])
        return {root: self._own(layout, chunks), **others}

    def _to_all(
        self, layout: BucketLayout, bucket: Bucket, chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device
    ) -> Parts:
        """All ranks' boxes, on every rank: via one all-gather of parts padded to the longest, or via broadcasts."""
        longest, world = max(layout.lengths), len(layout.lengths)
        if longest * world <= PADDED_BUCKETS * bucket.numel:
            part = self._packed(layout, chunks, longest, dtype, device)
            received = self.memory("received", world * longest, dtype, device)
            # torch 2.13 deprecates all_gather_into_tensor in favor of a name that 2.11 lacks.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            all_gather(received, part, group=self._group)
            parts = list(received.split(longest))
        else:
            parts = [
                self._packed(layout, chunks, length, dtype, device)
                if rank == self._rank
                else self.memory(f"from {rank}", length, dtype, device)
                for rank, length in enumerate(layout.lengths)
            ]
            for rank, part in enumerate(parts):
                if part.numel():
                    dist.broadcast(part, group=self._group, group_src=rank)
        return dict(enumerate(parts))


def first_of_stages(held: Sequence[set[str]]) -> dict[str, int]:
    """The first rank of each tensor's pipeline stage. `held` are the tensors of which each rank has any part or copy;
    ranks that have one, directly or through other ranks, form a stage. The first stage is sent by rank 0, whatever
    that holds. Pipeline stages with tied embeddings have that tensor, and count as one stage."""
    stages: list[tuple[int, set[str]]] = []
    for rank, names in enumerate(held):
        same = [stage for stage in stages if not stage[1].isdisjoint(names)]
        joined = (min([rank, *(first for first, _ in same)]), names.union(*(others for _, others in same)))
        stages = [*(stage for stage in stages if stage not in same), joined] if names else stages
    very_first = min((first for first, _ in stages), default=0)
    return {name: 0 if first == very_first else first for first, names in stages for name in names}


def _runs(boxes: Sequence[tuple[CopyKind, tuple[int, int]]]) -> list[BoxRun]:
    """One rank's boxes, each with its starts in the part and in the bucket, as runs."""
    runs = []
    for pieces in runs_of(boxes):
        (sizes, strides, _), (start, at) = boxes[pieces[0]]
        next_start, next_at = boxes[pieces[min(1, len(pieces) - 1)]][1]
        runs.append(BoxRun(pieces, sizes, start, next_start - start, at, next_at - at, strides))
    return runs


def _strides(shape: Shape) -> Shape:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _stacked(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Views [*sizes] as one [n, *sizes], if they lie at equal distances in the same memory."""
    first = views[0]
    if len(views) == 1:
        return first[None]
    alike = (first.dtype, first.stride(), first.untyped_storage().data_ptr())
    starts = [view.storage_offset() for view in views]
    step = starts[1] - starts[0]
    if step <= 0 or starts != list(range(starts[0], starts[0] + step * len(views), step)):
        return None
    if any((view.dtype, view.stride(), view.untyped_storage().data_ptr()) != alike for view in views):
        return None
    return first.as_strided((len(views), *first.shape), (step, *first.stride()), starts[0])


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _whole(boxes: Sequence[NamedBox]) -> int:
    """How many tensors a rank holds whole, if these boxes are all that it holds and cover each exactly once; else 0."""
    shapes = {name: shape for name, shape, _ in boxes}
    return 0 if holes(shapes, ((name, box) for name, _, box in boxes)) else len(shapes)


def _fault(chunks: Sequence[Chunk]) -> str:
    """What is wrong with one rank's chunks taken alone; "" if nothing."""
    for chunk in chunks:
        if tuple(chunk.view.shape) != tuple(chunk.sizes):
            return f"{chunk.name!r} has a view of shape {list(chunk.view.shape)}, but a box of {list(chunk.sizes)}"
        if not len(chunk.shape) == len(chunk.offsets) == len(chunk.sizes):
            return f"{chunk.name!r} has shape {list(chunk.shape)}, but a box with {len(chunk.sizes)} dimensions"
    return ""


def _checked_shapes(by_rank: list[list[NamedBox]]) -> list[tuple[str, Shape]]:
    shapes: dict[str, Shape] = {}
    ranks_of: dict[str, list[int]] = {}
    for rank, boxes in enumerate(by_rank):
        for name, shape, _ in boxes:
            if shapes.setdefault(name, shape) != shape:
                raise ContractError(
                    f"rank {rank} declares {name!r} as part of {list(shape)}, but rank {ranks_of[name][0]} as part of "
                    f"{list(shapes[name])}; give the shape of the whole HF tensor"
                )
            if rank not in ranks_of.setdefault(name, []):
                ranks_of[name].append(rank)
    wrong = holes(shapes, ((name, box) for boxes in by_rank for name, _, box in boxes))
    if wrong:
        name, missing = next(iter(wrong.items()))
        fault = f"omit {missing} elements" if missing > 0 else f"have {-missing} elements too many"
        raise ContractError(
            f"the chunks of rank(s) {', '.join(map(str, ranks_of[name]))} {fault} of {name!r}, {list(shapes[name])}"
            f"{f' (and {len(wrong) - 1} other tensors are wrong)' if len(wrong) > 1 else ''}; put every element in "
            "exactly one box, and mark further copies as replicas"
        )
    return list(shapes.items())


def all_gather_json(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The data of all ranks of `group` (None: of the default one), in their order. Called on every rank, with what JSON
    can hold; tuples arrive as lists. (torch's own way unpickles whatever another rank sends.)"""
    member = group if group is not None else dist.distributed_c10d._get_default_group()
    on_host = torch.device("cpu") in member._device_types
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    ranks = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    everything = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everything, padded, group=group)
    return [json.loads(row[:length].cpu().numpy().tobytes()) for row, length in zip(everything, lengths, strict=True)]
