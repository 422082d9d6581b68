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

    window: int | None = None  # so many, or all
    chunk: int | None = None  # those of its part of so many tokens, or all


def register_packed_attention() -> None:
    """Register PACKED with transformers. Idempotent."""
    AttentionInterface.register(PACKED, _attention)
    AttentionMaskInterface.register(PACKED, _mask)


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **kwargs: Any) -> Seen | None:
    """What transformers would make a mask of, (batch, head, query, key) -> whether the query sees the key; None if it
    is of another kind. Models make masks for layers that they do not have, so only attention complains of that."""
    size = local_size or 8
    kinds = [Seen()] if local_size is None else [Seen(window=size), Seen(chunk=size)]
    pairs = [(0, 0), (0, 1), (size, size - 1), (size, 1), (size, 0), (size - 1, 0), (3 * size, size), (3 * size, 0)]
    # Chunks begin where a tensor on the device says; asking for that would wait for the device, so only then.
    where = kwargs["device"] if getattr(kwargs["config"], "attention_chunk_size", None) else "cpu"
    queries, keys = torch.tensor(pairs, device=where).T
    sees = mask_function(0, 0, queries, keys)
    if sees.is_meta:  # of a model that is only looked at
        return kinds[-1]
    told = sees.tolist()
    return next((kind for kind in kinds if told == [_sees(kind, *pair) for pair in pairs]), None)


def _sees(kind: Seen, query: int, key: int) -> bool:
    far = kind.window is not None and query - key >= kind.window
    return key <= query and not far and (kind.chunk is None or query // kind.chunk == key // kind.chunk)


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
        asked.append("a mask that is neither causal nor a window or chunks of that")
    if dropout:
        asked.append("dropout")
    if asked:
        raise ModelError(f"{name} uses {', '.join(asked)}, which {PACKED} attention does not support")
    assert isinstance(attention_mask, Seen)
    if query.is_meta:  # of a model that is only looked at
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if attention_mask.chunk is not None:
        packing = packing.in_chunks(attention_mask.chunk)
    out = packed_attention(q, k, v, packing, scaling, window=attention_mask.window, softcap=softcap, sinks=s_aux)
    return out[None], None
