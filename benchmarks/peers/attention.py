"""For verl: attention of packed rows by the FlashAttention kernel in torch, as transformers' attention `packed`.

verl's own choice is the package flash-attn, of which there is no wheel for torch 2.11; transformers' others build a
mask of all pairs of tokens. verl imports this module by its option `model.external_lib`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.peers.work import ATTENTION
from corerl.ops.attention import packed_attention
from corerl.ops.packing import PackedSequences


class _Layout:
    """Of the newest micro-batch, which all layers share: reading it takes a synchronization with the device."""

    positions: Tensor | None = None
    packing: PackedSequences | None = None


def layout(positions: Tensor) -> PackedSequences:
    """Of rows whose `positions` [1, T] begin with 0 each."""
    if _Layout.positions is not positions or _Layout.packing is None:
        flat = positions.flatten()
        starts = torch.nonzero(flat == 0).flatten().cpu()
        bounds = torch.cat([starts, torch.tensor([len(flat)])])
        _Layout.positions, _Layout.packing = positions, PackedSequences.of(bounds, positions.device)
    return _Layout.packing


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query [1, H, T, D], key and value [1, Hkv, T, D] to [1, T, H, D]."""
    if len(query) != 1:
        raise ValueError(f"got {len(query)} padded rows, expected one of packed tokens: set model.use_remove_padding")
    q, k, v = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
    return packed_attention(q, k, v, layout(position_ids), scaling)[None], None


AttentionInterface.register(ATTENTION, attention)
