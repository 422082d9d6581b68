"""How tokens see earlier ones: packed attention, which transformers calls with `attn_implementation=PACKED` and
`packing=` in the model's call; and layers that carry a state along a row, for which packed sequences become rows."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, AttentionMaskInterface

from corerl.errors import ModelError
from corerl.kinds import InPieces
from corerl.ops.attention import LARGEST_HEAD, packed_attention
from corerl.ops.packing import PackedSequences

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
CACHES = ("past_key_values", "past_key_value", "cache_params", "layer_past")  # arguments of modules that mix tokens
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # in the code of attention that calls whichever is registered
COUNTS = "arange"  # in the code of what numbers the tokens of a row
NUMBERS = "create_position_ids_from_input_ids"  # of embeddings whose positions do not begin with 0
SCORES = ("softmax", "scaled_dot_product_attention")  # in the code of other attention
HEADS = ("head_dim", "qk_head_dim")  # attributes of attention: the elements of a query of one head
# Attributes of attention: what the packed kernel lacks.
BESIDES = {"sinks": InPieces.SINKS, "attn_logit_softcapping": InPieces.CAPS}


@frozen
class CausalMask:
    """Which tokens of its sequence a token sees, up to itself. Stands for the mask that transformers makes for a kind
    of layer: a mask over packed tokens would have [T, T] entries."""

    window: int | None = None  # so many, itself among them, or all


def register_packed_attention(*, compiled: bool = True) -> None:
    """Register PACKED with transformers; unless `compiled`, `torch.compile` leaves it out of layers. Idempotent."""
    AttentionInterface.register(PACKED, _attention if compiled else torch.compiler.disable(_attention))
    AttentionMaskInterface.register(PACKED, _mask)


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **kwargs: Any) -> CausalMask | None:
    """What transformers would make a mask of, (batch, head, query, key) -> whether the query sees the key; None if it
    is of another kind. Models make masks for layers that they do not have, so only attention complains of that."""
    size = local_size or 8
    pairs = [(0, 0), (0, 1), (size, size - 1), (size, 1), (size, 0), (size - 1, 0), (3 * size, size), (3 * size, 0)]
    queries, keys = torch.tensor(pairs).T
    seen = [key <= query and (local_size is None or query - key < size) for query, key in pairs]
    return CausalMask(window=local_size) if mask_function(0, 0, queries, keys).tolist() == seen else None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask | Tensor | None,
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
    if not isinstance(attention_mask, CausalMask):
        asked.append("a mask that is neither causal nor a window of that")
    if dropout:
        asked.append("dropout")
    if asked:
        raise ModelError(f"{name} uses {', '.join(asked)}, which {PACKED} attention does not support")
    assert isinstance(attention_mask, CausalMask)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = packed_attention(q, k, v, packing, scaling, window=attention_mask.window, softcap=softcap, sinks=s_aux)
    return out[None], None


def require_packable(model: nn.Module, decoder: nn.Module) -> None:
    """Raise ModelError unless sequences can be packed for the `decoder` of `model`."""
    name, found = type(model).__name__, mixers(decoder)
    registered = [module for module in found if _has(module, INTERFACE)]
    own = [module for module in found if module not in registered and _has(module, *SCORES)]
    if own or not found:
        raise ModelError(
            f"{name} computes attention with its own code ({type(own[0] if own else decoder).__name__}), which treats "
            "packed sequences as one; packing requires transformers' attention interface"
        )
    if any(_has(module, COUNTS) for module in registered) or any(hasattr(each, NUMBERS) for each in decoder.modules()):
        raise ModelError(f"{name} numbers the positions of tokens in its own way, which packing would not")
    if registered and "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ModelError(f"{type(decoder).__name__} takes no position_ids, which packed sequences need")


def carries_state(decoder: nn.Module) -> bool:
    """Whether tokens see earlier ones in other ways than attention."""
    return any(not _has(module, INTERFACE, *SCORES) for module in mixers(decoder))


def attention_in_pieces(decoder: nn.Module) -> InPieces | None:
    """Why `packed_attention` takes more than its kernel for packed tokens, on devices and in precisions for which there
    is one; None if tokens see earlier ones through that alone."""
    found = mixers(decoder)
    for module in found:
        if not _has(module, INTERFACE):
            return InPieces.OWN if _has(module, *SCORES) else InPieces.STATE
        for name, why in BESIDES.items():
            if getattr(module, name, None) is not None:
                return why
        if any((getattr(module, name, None) or 0) > LARGEST_HEAD for name in HEADS):
            return InPieces.HEADS
    return None if found else InPieces.OWN


def run_on_rows(decoder: nn.Module) -> list[nn.Module]:
    """Have the layers that carry a state along a row called with rows of which each is one sequence; returns them."""
    found = other_mixers(decoder)
    for module in found:
        in_rows = partial(_in_rows, module.forward, type(module).__name__, _values(type(module)))
        module.forward = torch.compiler.disable(in_rows)
    return found


def other_mixers(decoder: nn.Module) -> list[nn.Module]:
    """The modules that let tokens see earlier ones in other ways than registered attention."""
    return [module for module in mixers(decoder) if not _has(module, INTERFACE)]


def mixers(decoder: nn.Module) -> list[nn.Module]:
    """The innermost modules that transformers gives a cache of earlier tokens."""
    takes = {
        name: module
        for name, module in decoder.named_modules()
        if name and not inspect.signature(type(module).forward).parameters.keys().isdisjoint(CACHES)
    }
    outer = {name[:end] for name in takes for end in range(len(name)) if name[end] == "."}
    # A layer in which nothing takes a cache is one itself: what looks like a layer without a mixer may have a state.
    return [module for name, module in takes.items() if name not in outer]


def _has(module: nn.Module, *words: str) -> bool:
    """Whether one of the words is in the code of the module's class, or of those that it extends."""
    code = _code(type(module))  # type: ignore[arg-type]  # mypy takes no class of modules for hashable
    return any(word in code for word in words)


@functools.cache  # reading a class takes milliseconds, and models have many modules of few classes
def _code(kind: type[nn.Module]) -> str:
    return "\n".join(inspect.getsource(each) for each in kind.__mro__[: kind.__mro__.index(nn.Module)])


def _values(kind: type[nn.Module]) -> int | None:
    """How many values forward returns, None if it is not a tuple."""
    code = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    returned = [node.value for node in ast.walk(code) if isinstance(node, ast.Return)]
    return len(returned[-1].elts) if returned and isinstance(returned[-1], ast.Tuple) else None


def _in_rows(
    forward: Callable[..., Any],
    name: str,
    values: int | None,
    /,
    *args: Any,
    packing: PackedSequences | None = None,
    **kwargs: Any,
) -> Any:
    """Call `forward` with each tensor [1, T, ...] as padded rows [S, L, ...]; returns what it makes of hidden states as
    [1, T, ...], and None for the states that it returns besides.

    It is called once, however many tokens there are: ranks that gather its weights together call it equally often. On
    meta it is not called if its packing is not, since it may be a kernel for GPUs, which does not ask where its
    arguments are.
    """
    if packing is None:
        raise ModelError(
            f"{name} is called without the bounds of sequences; {PACKED} attention requires that PackedPolicy runs the "
            "model, and that each layer passes on further arguments"
        )
    given = (args, kwargs)
    if any(isinstance(each, CausalMask) for each in tree_leaves(given)):
        raise ModelError(f"{name} computes attention with its own code, which treats packed sequences as one")
    layout, gather, scatter = packing.rows
    (shape,) = layout.shapes

    def in_rows(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.shape[:2] != (1, packing.tokens):
            return each
        return each[0].index_select(0, gather).view(*shape, *each.shape[2:])

    hidden = next(each for each in tree_leaves(given) if isinstance(each, Tensor))
    if hidden.is_meta and not packing.cu_seqlens.is_meta:
        return hidden if values is None else (hidden, *[None] * (values - 1))
    rows, options = tree_map(in_rows, given)
    hidden, *states = result if isinstance(result := forward(*rows, **options), tuple) else (result,)
    packed = hidden.flatten(0, 1).index_select(0, scatter)[None]
    return (packed, *[None] * len(states)) if isinstance(result, tuple) else packed
