"""Gather full Hugging Face tensors, one bucket at a time, from the boxes that the ranks hold."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from corerl.errors import ContractError
from corerl.weights.chunks import Box, Chunk, holes, within
from corerl.weights.manifest import Bucket

Shape: TypeAlias = tuple[int, ...]
NamedBox: TypeAlias = tuple[str, Shape, Box]  # a tensor's name and whole shape, and a box of it

# If all ranks receive, and padding all parts to equal size would take more than this many buckets of memory (as with
# pipeline stages, where one rank holds the whole bucket), the parts are broadcast one by one, without padding.
PADDED_BUCKETS = 2


@frozen
class Piece:
    """One box of a bucket: its place in its rank's part, and its place in the bucket."""

    start: int  # [start, stop) of the rank's part, in elements
    stop: int
    sizes: Shape
    entry_start: int  # its tensor is [entry_start, entry_stop) of the bucket
    entry_stop: int
    entry_shape: Shape
    target: tuple[slice, ...]  # slices of that tensor

    def place(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the box [*sizes] to its place in the bucket [bucket.numel]."""
        out[self.entry_start : self.entry_stop].view(self.entry_shape)[self.target].copy_(values)


@frozen
class BucketLayout:
    """How one bucket is gathered; equal on all ranks except for `own`."""

    pieces: list[list[Piece]]  # by rank
    lengths: list[int]  # elements of each rank's part
    own: list[int]  # this rank's pieces, as positions in the chunks that the plan was built from


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
        rank = 0 if group is None else dist.get_rank(group)
        faults, wholes, copied, boxes_of = zip(*([mine] if group is None else gather_plain(mine, group)), strict=True)
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
    ) -> torch.Tensor | None:
        """Gather the whole bucket [bucket.numel] in `dtype`, on `root` (a rank of the group; None: on every rank).

        Called on every rank, with the chunks that the plan was built from, or fresh ones of the same boxes in the same
        order. Writes to `out` [bucket.numel], if given. Returns None on ranks that do not receive.
        """
        layout = self._layouts.get(bucket) or self._layouts.setdefault(bucket, self._layout(bucket))
        device = out.device if out is not None else chunks[0].view.device if chunks else torch.device("cpu")
        if root is not None and root != self._rank:
            out = None
        elif out is None:
            out = torch.empty(bucket.numel, dtype=dtype, device=device)
        with torch.no_grad():
            if self._all_whole:
                parts = [self._own(layout, chunks) if pieces else [] for pieces in layout.pieces]
            elif root is None:
                parts = self._to_all(layout, bucket, chunks, dtype, device)
            else:
                parts = self._to_root(layout, chunks, root, dtype, device)
            if out is not None:
                for pieces, part in zip(layout.pieces, parts, strict=True):
                    for piece, values in zip(pieces, part, strict=True):
                        piece.place(values, out)
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
        pieces: list[list[Piece]] = [[] for _ in self._boxes]
        lengths = [0] * len(self._boxes)
        own: list[int] = []
        for entry in bucket.entries:
            for rank, index in self._by_name[entry.name]:
                _, shape, box = self._boxes[rank][index]
                start, stop = lengths[rank], lengths[rank] + math.prod(box[1])
                target = within(box, ((0,) * len(shape), shape))
                piece = Piece(start, stop, box[1], entry.start, entry.start + entry.numel, shape, target)
                pieces[rank].append(piece)
                lengths[rank] = stop
                if rank == self._rank:
                    own.append(self._positions[index])
        return BucketLayout(pieces, lengths, own)

    def _own(self, layout: BucketLayout, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        return [chunks[position].view for position in layout.own]

    def _packed(
        self, layout: BucketLayout, chunks: Sequence[Chunk], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This rank's boxes, cast and concatenated into [numel]; the tail may be padding."""
        part = self.memory("part", numel, dtype, device)
        for piece, values in zip(layout.pieces[self._rank], self._own(layout, chunks), strict=True):
            part[piece.start : piece.stop].view(piece.sizes).copy_(values)
        return part

    def _to_root(
        self, layout: BucketLayout, chunks: Sequence[Chunk], root: int, dtype: torch.dtype, device: torch.device
    ) -> list[list[torch.Tensor]]:
        """All ranks' pieces, on `root`: its own directly, the others' received as parts of their own lengths."""
        if root != self._rank:
            if length := layout.lengths[self._rank]:
                part = self._packed(layout, chunks, length, dtype, device)
                _exchange([dist.P2POp(dist.isend, part, group=self._group, group_peer=root)])
            return []
        others = {
            rank: self.memory(f"from {rank}", length, dtype, device)
            for rank, length in enumerate(layout.lengths)
            if length and rank != root
        }
        _exchange([dist.P2POp(dist.irecv, part, group=self._group, group_peer=rank) for rank, part in others.items()])
        return [
            self._own(layout, chunks) if rank == root else _cut(pieces, others[rank]) if pieces else []
            for rank, pieces in enumerate(layout.pieces)
        ]

    def _to_all(
        self, layout: BucketLayout, bucket: Bucket, chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device
    ) -> list[list[torch.Tensor]]:
        """All ranks' pieces, on every rank: via one all-gather of parts padded to the longest, or via broadcasts."""
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
        return [_cut(pieces, part) for pieces, part in zip(layout.pieces, parts, strict=True)]


def first_of_stages(held: Sequence[set[str]]) -> dict[str, int]:
    """The first rank of each tensor's pipeline stage. `held` are the tensors of which each rank has any part or copy;
    ranks that have one, directly or through other ranks, form a stage. The first stage is sent by rank 0, whatever
    that holds. Pipeline stages with tied embeddings have that tensor, and count as one stage.
    """
    stages: list[tuple[int, set[str]]] = []
    for rank, names in enumerate(held):
        same = [stage for stage in stages if not stage[1].isdisjoint(names)]
        joined = (min([rank, *(first for first, _ in same)]), names.union(*(others for _, others in same)))
        stages = [*(stage for stage in stages if stage not in same), joined] if names else stages
    very_first = min((first for first, _ in stages), default=0)
    return {name: 0 if first == very_first else first for first, names in stages for name in names}


def _cut(pieces: Sequence[Piece], part: torch.Tensor) -> list[torch.Tensor]:
    """Split a part into its boxes, each [*piece.sizes]."""
    return [part[piece.start : piece.stop].view(piece.sizes) for piece in pieces]


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


def gather_plain(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
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
