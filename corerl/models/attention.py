"""Register packed attention with transformers: `attn_implementation=PACKED`, and `packing=` in the model's call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from corerl.errors import ModelError
from corerl.ops.attention import PackedSequences, packed_attention

PACKED = "corerl_packed"

# Attention options of some models, beyond softmax(q k^T) v, that packed_attention does not support.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "indices")


def register_packed_attention() -> None:
    """Register PACKED with transformers. Idempotent."""
    AttentionInterface.register(PACKED, _attention)
    AttentionMaskInterface.register(PACKED, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: `packing` replaces it, and a mask over packed tokens would have [T, T] entries."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Packed attention of query [1, H, T, D], key and value [1, Hkv, T, D]; returns [1, T, H, D]."""
    name = type(module).__name__
    if packing is None:
        raise ModelError(
            f"{name} calls its attention without the bounds of sequences; {PACKED} attention requires that "
            "CausalPolicy runs the model, and that each layer passes on further arguments"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ModelError(
            f"{name} has queries {list(query.shape)} and keys {list(key.shape)}; {PACKED} attention requires one "
            "row of packed tokens and no cache"
        )
    asked = [option for option in UNSUPPORTED if kwargs.get(option) is not None]
    if attention_mask is not None:  # `_no_mask` makes none, so this mask is the model's own
        asked.append("its own mask")
    if dropout:
        asked.append("dropout")
    if asked:
        raise ModelError(f"{name} uses {', '.join(asked)}, which {PACKED} attention does not support")
    if query.is_meta:  # of a model that is only looked at
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, packing, scaling)[None], None
