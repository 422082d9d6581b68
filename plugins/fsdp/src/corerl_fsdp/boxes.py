"""The boxes of a DTensor that this rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from corerl.errors import ModelError


def dtensor_boxes(tensor: Tensor, local: Tensor | None = None) -> list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """(offsets, sizes, view) for each box of `tensor` that this rank holds; a plain tensor is one box.

    `view` is a view of the tensor's own local part, or of `local`, which has the same shape. Shards may be uneven,
    empty or strided (`_StridedShard`). A strided local part is several boxes, although torch's checkpoint hooks treat
    it as one. Raises ModelError on a partial sum.
    """
    if not isinstance(tensor, DTensor):
        part = (tensor if local is None else local).detach()
        return [((0,) * part.dim(), tuple(part.shape), part)] if part.numel() else []
    part = (tensor if local is None else local).detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or part.numel() == 0:
        return []
    runs = [[(0, size)] for size in tensor.shape]  # for each dim, the [start, stop) on this rank, in local order
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ModelError(f"a tensor of shape {list(tensor.shape)} is a partial sum; reduce it first")
        if placement.is_replicate():
            continue
        dim, factor = _shard(placement)
        ranks, rank = tensor.device_mesh.size(axis), coordinate[axis]
        pieces = [_nth(runs[dim], factor, i) for i in range(factor)]
        runs[dim] = [run for piece in pieces for run in _nth(piece, ranks, rank)]
    walks = [_with_local_start(dim_runs) for dim_runs in runs]
    held = tuple(sum(stop - start for start, stop in dim_runs) for dim_runs in runs)
    if held != tuple(part.shape):
        raise ModelError(
            f"this rank's part of a {list(tensor.shape)} tensor has shape {list(part.shape)}, expected {list(held)} "
            f"with {tensor.placements}"
        )
    return [
        (
            tuple(start for start, _, _ in combination),
            tuple(size for _, size, _ in combination),
            part[tuple(slice(at, at + size) for _, size, at in combination)],
        )
        for combination in itertools.product(*walks)
    ]


Run = tuple[int, int]


def _shard(placement: Placement) -> tuple[int, int]:
    """The dim that a placement shards, and its split factor: the shards of later mesh axes; 1 unless a _StridedShard.

    A _StridedShard is not a Shard in torch 2.11 and later; it has the same two attributes in all versions.
    """
    if not hasattr(placement, "dim"):
        raise ModelError(f"placement {placement} is neither a shard nor replicated")
    return int(placement.dim), int(getattr(placement, "split_factor", 1))


def _nth(runs: Sequence[Run], pieces: int, index: int) -> list[Run]:
    """Piece `index` of the elements in `runs`, split like torch.chunk: ceil(n / pieces) each, the last ones shorter."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // pieces)
    low, high = index * size, (index + 1) * size
    out, seen = [], 0
    for start, stop in runs:
        begin, end = max(low - seen, 0), min(high - seen, stop - start)
        if begin < end:
            out.append((start + begin, start + end))
        seen += stop - start
    return out


def _with_local_start(runs: Iterable[Run]) -> list[tuple[int, int, int]]:
    """(global start, size, local start) of each run, adjacent runs merged."""
    walk: list[tuple[int, int, int]] = []
    at = 0
    for start, stop in runs:
        if walk and walk[-1][0] + walk[-1][1] == start:
            walk[-1] = (walk[-1][0], walk[-1][1] + stop - start, walk[-1][2])
        else:
            walk.append((start, stop - start, at))
        at += stop - start
    return walk
