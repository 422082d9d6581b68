"""Check that sequences can be packed for a transformers model, and say why if they cannot.

That pass packs sequences, which attention must keep apart, calls the decoder, and multiplies its hidden states by the
head's weight. Anything else that a model does would be silently left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from corerl.errors import ModelError
from corerl.models.attention import PACKED, register_packed_attention
from corerl.ops.attention import PackedSequences

# Config fields of models that do more between hidden states and logits than multiply by the head's weight.
SCALINGS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)

JITTER = (
    "uses router_jitter_noise, which CoreRL sets to 0, also to mask experts, so its log-probs would differ from an "
    "engine's"
)
# Model types that nothing in their config gives away -> what they do.
OTHERS = {
    "phimoe": JITTER,
}


def require_interface(architecture: type[PreTrainedModel]) -> None:
    """Raise ModelError if the model does not use transformers' attention interface: registered attention would not be
    called, or would not get the sequence bounds."""
    if not getattr(architecture, "_supports_attention_backend", False):
        raise ModelError(
            f"{architecture.__name__} computes attention with its own code, which treats packed sequences as one; "
            "packing requires transformers' attention interface"
        )


def require_packable(model: PreTrainedModel) -> None:
    """Raise ModelError if the model does something that the pass would leave out."""
    config, name = model.config.get_text_config(), type(model).__name__
    if reason := OTHERS.get(config.model_type):
        raise ModelError(f"{name} {reason}")
    for scaling in SCALINGS:
        value = getattr(config, scaling, None)
        if value is not None and value != 1.0:
            raise ModelError(f"{name} changes its logits with {scaling}={value}, which packed sequences leave out")
    layer_types = getattr(config, "layer_types", None)
    if kinds := set(layer_types or ()) - {"full_attention"}:
        raise ModelError(f"{name} has layers with {', '.join(sorted(kinds))}; packing requires full attention")
    window = getattr(config, "sliding_window", None)
    if window is not None and not layer_types:
        raise ModelError(f"{name} has sliding_window={window} in all layers; packing requires full attention")
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if module is head), "")
    if head is not None and "." in path:
        raise ModelError(
            f"{name} has its head at {path!r}, inside layers that packing would skip; it requires models whose "
            "logits are the hidden states times the head's weight"
        )
    _require_bare_head(model)


def require_packed_attention(model: PreTrainedModel) -> None:
    """Raise ModelError if the layers of `model`, which is wholly on meta, ask packed attention for what it lacks, or do
    not pass it the bounds of sequences."""
    register_packed_attention()
    configs: dict[int, Any] = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        for config in configs.values():
            config._attn_implementation = PACKED
        with torch.no_grad():
            # Without a mask, transformers would read the positions, of which there are none.
            model.get_decoder()(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                packing=PackedSequences.of(np.array([0, 2]), "cpu"),
            )
    except ModelError:
        raise
    except Exception:
        # Some code depends on values, such as that of experts, which on meta there are none of. What comes before it
        # has been seen, in nearly all models the attention of the first layer.
        return
    finally:
        for config, attention in before:
            config._attn_implementation = attention


class _Reached(Exception):
    """Ends a pass where the head is called."""


def _require_bare_head(model: PreTrainedModel) -> None:
    """Raise ModelError unless the head is called with the decoder's hidden states as they are.

    The model's own forward runs, with a stand-in for the decoder, as far as the head: no layer computes anything. A
    critic has no such head, and of a model that computes logits without calling it nothing is learned.
    """
    name, decoder, head = type(model).__name__, model.get_decoder(), model.get_output_embeddings()
    call = {"input_ids": None, "position_ids": None, "attention_mask": None, "use_cache": False, "packing": None}
    try:
        inspect.signature(decoder.forward).bind(**call)
        found = decoder is not model
    except TypeError:
        found = False
    if not found:
        raise ModelError(
            f"{name} returns {type(decoder).__name__} as its decoder, which does not turn tokens into hidden states; "
            "packing requires models whose logits are the hidden states times the head's weight"
        )
    if head is None:
        return
    hidden = head.weight.new_empty(1, 2, model.config.get_text_config().hidden_size)
    given: list[torch.Tensor] = []

    def at_head(module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        given.extend([*args, *kwargs.values()])
        raise _Reached

    tokens = torch.zeros(1, 2, dtype=torch.long, device=hidden.device)
    reached = MoeModelOutputWithPast(hidden)
    decoder.forward = lambda *args, **kwargs: reached  # hides the class's own until it is deleted
    handle = head.register_forward_pre_hook(at_head, with_kwargs=True)
    try:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
        del decoder.forward
    # Models slice hidden states before the head, by default to all of them, which makes a view.
    if given and not (given[0].shape == hidden.shape and (given[0] is hidden or given[0]._base is hidden)):
        raise ModelError(
            f"{name} changes the decoder's hidden states before its head, which packing would skip; it requires "
            "models whose logits are the hidden states times the head's weight"
        )


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
