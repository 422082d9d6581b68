"""Packed sequences in Megatron's format, and their split over context-parallel ranks.

Each sequence of L tokens is cut into 2 cp chunks of equal length; rank r holds the r-th from the front and the r-th
from the back, so that under a causal mask all ranks have the same amount of work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from corerl.ops import PackedSequences, upload
from corerl.types import IntArray
from corerl_megatron.rotary import Turns


@frozen(eq=False)
class Split:
    """How T packed tokens are split over context-parallel ranks."""

    local: Tensor  # [T / cp] int64: this rank's tokens, as indices into all tokens
    restore: Tensor  # [T] int64: all tokens in order, as indices into the concatenated parts of the ranks

    @classmethod
    def of(cls, bounds: IntArray, *, rank: int, ranks: int, device: torch.device) -> Split:
        """Split sequences with `bounds` [S + 1], whose lengths are multiples of 2 cp."""
        parts = [zigzag(bounds, rank=r, ranks=ranks) for r in range(ranks)]
        order = np.concatenate(parts)
        restore = np.empty_like(order)
        restore[order] = np.arange(len(order))
        return cls(upload(parts[rank], device), upload(restore, device))


def zigzag(bounds: IntArray, *, rank: int, ranks: int) -> IntArray:
    """[T / cp] indices of one rank's tokens, sequence by sequence."""
    chunk = np.diff(bounds) // (2 * ranks)
    starts = bounds[:-1]
    pieces = [
        np.arange(start + at * size, start + (at + 1) * size)
        for start, size in zip(starts, chunk, strict=True)
        for at in (rank, 2 * ranks - 1 - rank)
    ]
    return np.concatenate([np.zeros(0, np.int64), *pieces])


class PackedParams(PackedSeqParams):
    """Megatron's parameters, with CoreRL's view of the same sequences for layers in plain torch."""

    packing: PackedSequences  # of whole sequences, regardless of the split
    split: Split | None  # None without context parallelism


def packed_params(packing: PackedSequences, split: Split | None, positions: Tensor) -> PackedParams:
    """`positions` [T / cp] are those of this rank's tokens in their sequences."""
    cu, longest = packing.cu_seqlens, packing.longest
    # All that the function which turns queries and keys is given of the sequences, in every layer.
    cu.turns = Turns(positions, longest, split)  # type: ignore[attr-defined]
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
    """Gather [T / cp, ...] of each rank to [T, ...] in order, on all ranks. The backward pass takes the local slice of
    the gradient, since every rank computes the same loss of the whole."""
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
    """An all-gather whose result each rank uses for different work, so the backward pass sums gradients over ranks."""

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
