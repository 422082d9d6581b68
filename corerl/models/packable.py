"""Check that sequences can be packed for a transformers model, and say why if they cannot."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models.attention import PACKED, register_packed_attention
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.head import Reads
from corerl.models.mixers import attends, counts_tokens, keep_apart, kept_apart, mixers, unregistered_attention
from corerl.models.parts import Parts
from corerl.ops.attention import PackedSequences

NUMBERS = "create_position_ids_from_input_ids"  # of embeddings whose positions do not begin with 0


def require_packable(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ModelError unless sequences can be packed for the `decoder` of `model`."""
    name = type(model).__name__
    if (module := unregistered_attention(decoder)) is not None:
        raise ModelError(
            f"{name} computes attention with its own code ({type(module).__name__}), which treats packed sequences as "
            "one; packing requires transformers' attention interface"
        )
    if counts_tokens(decoder) is not None or any(hasattr(module, NUMBERS) for module in decoder.modules()):
        raise ModelError(f"{name} numbers the positions of tokens in its own way, which packing would not")
    if "position_ids" not in inspect.signature(decoder.forward).parameters and attends(decoder):
        raise ModelError(
            f"{type(decoder).__name__} cannot be told the positions of tokens, which in packed sequences begin anew"
        )


def require_packed_attention(decoder: PreTrainedModel) -> None:
    """Raise ModelError if the layers of a decoder that is wholly on meta ask packed attention for what it lacks, or do
    not pass it the bounds of sequences."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    mask = torch.ones_like(tokens, device="cpu")  # some layers' code asks whether it hides anything
    with _looked_at(decoder) as unseen, torch.no_grad():
        try:
            decoder(**_call(tokens, tokens, mask, PackedSequences.of(np.array([0, 2]), "cpu")))
        except ModelError:
            raise
        except Exception as error:
            # Some code depends on values, of which there are none on meta. Then it is enough that each kind of layer
            # that mixes tokens was called.
            if unseen or not isinstance(error, RuntimeError):
                raise ModelError(
                    f"{type(decoder).__name__} cannot be called with packed sequences ({one_line(error)})"
                ) from error


def unread_parameters(model: PreTrainedModel, parts: Parts) -> set[str]:
    """Names of the parameters that no pass over text reads, so that they never get a gradient: attention to an encoder
    that is not there, for example. `model` is wholly on meta; empty if its code depends on values."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    mask = torch.ones_like(tokens, device="cpu")
    passed_over = {id(param) for module in kept_apart(parts.decoder) for param in module.parameters()}  # on meta
    with _looked_at(parts.decoder), Reads() as reads, torch.no_grad():
        try:
            parts.decoder(**_call(tokens, tokens, mask, PackedSequences.of(np.array([0, 2]), "cpu")))
        except Exception:  # as above
            return set()
    read = passed_over | reads.parameters.keys()
    after = {VALUE_HEAD_WEIGHT} if parts.head is None else set(parts.head.reads)
    return {name for name, param in model.named_parameters() if id(param) not in read} - after


@contextmanager
def _looked_at(decoder: PreTrainedModel) -> Iterator[set[type]]:
    """Within the block, the decoder is one that `PackedPolicy` runs, with experts that can be on meta. Gives the
    classes of modules that mix tokens and have not been called."""
    register_packed_attention()
    held = (getattr(each, "config", None) for each in decoder.modules())
    configs: dict[int, Any] = {id(each): each for each in held if isinstance(each, PreTrainedConfig)}
    before = [(config, config._attn_implementation, config._experts_implementation) for config in configs.values()]
    apart = keep_apart(decoder)
    unseen = {type(module) for module in mixers(decoder)}
    handles = [
        module.register_forward_hook(lambda module, *_: unseen.discard(type(module))) for module in mixers(decoder)
    ]
    try:
        for config in configs.values():
            config._attn_implementation, config._experts_implementation = PACKED, "batched_mm"
        yield unseen
    finally:
        for handle in handles:
            handle.remove()
        for module in apart:
            del module.forward
        for config, attention, experts in before:
            config._attn_implementation, config._experts_implementation = attention, experts


def packed_call(tokens: torch.Tensor, positions: torch.Tensor, packing: PackedSequences) -> dict[str, Any]:
    """The arguments of a decoder for packed tokens and positions [T]."""
    # Without a mask, transformers would look for packed sequences in the positions, which waits for the device.
    return _call(tokens[None], positions[None], torch.ones_like(tokens)[None], packing)


def _call(tokens: Any, positions: Any, mask: Any, packing: Any) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": mask,
        "use_cache": False,
        "packing": packing,
    }


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """The number of tokens above which rotary frequencies depend on the longest sequence of a pass, so that a
    sequence's log-probs would depend on what it is packed with; None if they never do."""
    text = config.get_text_config()
    found: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    tables = [each for each in found.values() if isinstance(each, Mapping)] or [found]  # one for each type of layer
    limits = []
    for table in tables:
        kind = table.get("rope_type") or "default"
        if kind == "longrope":
            limits.append(int(table["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(text.max_position_embeddings))
    return min(limits, default=None)
