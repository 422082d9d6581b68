"""Packed sequences in Megatron's form, and their split over context-parallel ranks.

Each sequence of L tokens is cut into 2 cp chunks of equal length, of which rank r holds the r-th from the front and the
r-th from the back: under a causal mask all ranks then have equally much to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from corerl.ops.attention import PackedSequences
from corerl.ops.upload import upload
from corerl.types import IntArray


@frozen(eq=False)
class Split:
    """Which of T packed tokens each context-parallel rank holds, in its order."""

    local: Tensor  # [T / cp] int64: this rank's tokens, as indices of all
    restore: Tensor  # [T] int64: all tokens in order, as indices of the ranks' parts laid end to end

    @classmethod
    def of(cls, bounds: IntArray, *, rank: int, ranks: int, device: torch.device) -> Split:
        """`bounds` [S + 1] are of sequences whose lengths are multiples of 2 cp."""
        parts = [zigzag(bounds, rank=r, ranks=ranks) for r in range(ranks)]
        order = np.concatenate(parts)
        restore = np.empty_like(order)
        restore[order] = np.arange(len(order))
        return cls(upload(parts[rank], device), upload(restore, device))


def zigzag(bounds: IntArray, *, rank: int, ranks: int) -> IntArray:
    """[T / cp] the tokens of one rank, sequence by sequence."""
    chunk = np.diff(bounds) // (2 * ranks)
    starts = bounds[:-1]
    pieces = [
        np.arange(start + at * size, start + (at + 1) * size)
        for start, size in zip(starts, chunk, strict=True)
        for at in (rank, 2 * ranks - 1 - rank)
    ]
    return np.concatenate([np.zeros(0, np.int64), *pieces])


class PackedParams(PackedSeqParams):
    """Megatron's own, with CoreRL's view of the same sequences for layers of plain torch."""

    packing: PackedSequences  # of whole sequences, whatever the split
    split: Split | None  # None without context parallelism


def packed_params(packing: PackedSequences, split: Split | None) -> PackedParams:
    cu, longest = packing.cu_seqlens, packing.longest
    params = PackedParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.packing, params.split = packing, split
    return params


def gather_tokens(local: Tensor, split: Split, group: ProcessGroup) -> Tensor:
    """[T / cp, ...] of each rank as [T, ...] in order, on all ranks. The gradient of the local part is that part of the
    result's: every rank computes the same loss of the whole."""
    gathered: Tensor = _Gather.apply(local, group)
    return gathered.index_select(0, split.restore)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.ranks = group.rank(), group.size()
        return all_gathered(local, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].chunk(ctx.ranks)[ctx.rank], None


class SumOfGather(torch.autograd.Function):
    """As an all-gather whose result each rank uses for another part of the work: gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gathered(local, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def all_gathered(local: Tensor, group: ProcessGroup) -> Tensor:
    out = local.new_empty(group.size() * len(local), *local.shape[1:])
    # torch 2.13 deprecates all_gather_into_tensor for a name that 2.11 does not have yet.
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(out, local.contiguous(), group=group)
    return out
