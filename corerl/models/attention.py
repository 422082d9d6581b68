"""Register packed attention with transformers: `attn_implementation=PACKED`, and `packing=` in the model's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from corerl.errors import ModelError
from corerl.ops.attention import PackedSequences, packed_attention

PACKED = "corerl_packed"

# What layers pass on to attention besides, and what full attention does not depend on.
WITHOUT_EFFECT = (
    "sliding_window",  # as in the mask
    "is_causal",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "deterministic",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)


@frozen
class Seen:
    """Which tokens of its sequence a token sees, up to itself. Stands for the mask that transformers makes for a kind
    of layer: a mask over packed tokens would have [T, T] entries."""

    window: int | None = None  # so many, itself among them, or all


def register_packed_attention(*, compiled: bool = True) -> None:
    """Register PACKED with transformers; unless `compiled`, `torch.compile` leaves it out of layers. Idempotent."""
    AttentionInterface.register(PACKED, _attention if compiled else torch.compiler.disable(_attention))
    AttentionMaskInterface.register(PACKED, _mask)


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **kwargs: Any) -> Seen | None:
    """What transformers would make a mask of, (batch, head, query, key) -> whether the query sees the key; None if it
    is of another kind. Models make masks for layers that they do not have, so only attention complains of that."""
    size = local_size or 8
    pairs = [(0, 0), (0, 1), (size, size - 1), (size, 1), (size, 0), (size - 1, 0), (3 * size, size), (3 * size, 0)]
    queries, keys = torch.tensor(pairs).T
    seen = [key <= query and (local_size is None or query - key < size) for query, key in pairs]
    return Seen(window=local_size) if mask_function(0, 0, queries, keys).tolist() == seen else None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Packed attention of query [1, H, T, D], key and value [1, Hkv, T, D]; returns [1, T, H, D].

    `softcap` and the sinks `s_aux` [H] are those of `packed_attention`."""
    name = type(module).__name__
    if packing is None:
        raise ModelError(
            f"{name} calls its attention without the bounds of sequences; {PACKED} attention requires that "
            "PackedPolicy runs the model, and that each layer passes on further arguments"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ModelError(
            f"{name} has queries {list(query.shape)} and keys {list(key.shape)}; {PACKED} attention requires one "
            "row of packed tokens and no cache"
        )
    asked = [option for option, given in kwargs.items() if given is not None and option not in WITHOUT_EFFECT]
    if not isinstance(attention_mask, Seen):
        asked.append("a mask that is neither causal nor a window of that")
    if dropout:
        asked.append("dropout")
    if asked:
        raise ModelError(f"{name} uses {', '.join(asked)}, which {PACKED} attention does not support")
    assert isinstance(attention_mask, Seen)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = packed_attention(q, k, v, packing, scaling, window=attention_mask.window, softcap=softcap, sinks=s_aux)
    return out[None], None
