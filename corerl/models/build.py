"""Build a transformers model without its weights, put them in afterwards, and recompute activations."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models.attention import PACKED, register_packed_attention
from corerl.models.config import reads_pictures

NOISE = ("drop", "jitter")  # in the names of config fields: attention_dropout, resid_pdrop, router_jitter_noise
BIASES = r"bias(es)?$"  # in the names of buffers: routers add them to their scores
VALUE_HEAD = "value_head"
VALUE_HEAD_WEIGHT = f"{VALUE_HEAD}.weight"  # [1, hidden], under this name in every backend and checkpoint


def build_on_meta(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    attention: str,
    value_head: bool = False,
    buffers: bool = True,
    vectors: bool = False,
    compute: torch.dtype | None = None,
    pictures: bool = False,
) -> PreTrainedModel:
    """Build the causal language model of `config`: parameters on meta in `dtype`, real buffers on the CPU. Of one that
    reads pictures, only what text passes through, the text decoder and its head, except with `pictures`.

    `attention` is an attention of transformers ('sdpa', 'eager') or `models.attention.PACKED`. With `value_head` the
    model is a critic: the language-model head is gone, and `model.value_head` is a linear map to one number. `config`
    is not changed; the model's copy has no dropout or other training noise. Raises ModelError if transformers cannot
    build the model, or if it stores whole numbers.

    Buffers are real because no checkpoint holds rotary frequencies: on meta, or after `to_empty()`, they would be lost.
    Without `buffers` they are on meta too, for a model that is only inspected: it takes no memory.
    With `vectors`, parameters of one dim or none are real, and as transformers draws them.

    Stored buffers are in `compute`, by default `dtype`: what layers multiply by must have their dtype. Those of routers
    are in float32, as are those that transformers keeps in it: rounded, a bias would choose other experts.
    """
    config = copy.deepcopy(config)
    config.use_cache = False  # with a cache transformers silently takes packed rows for one sequence
    _silence(config)
    if attention == PACKED:
        register_packed_attention()
    # The hook moves each parameter to meta as it is registered, before its storage is ever written to.
    handle = register_module_parameter_registration_hook(partial(_to_meta, kept=2 if vectors else 0))
    try:
        with nullcontext() if buffers else torch.device("meta"):
            model: PreTrainedModel = _auto_class(config).from_config(
                config,
                dtype=dtype,
                attn_implementation=_attentions(config, attention, towers=pictures),
                trust_remote_code=False,
            )
            if reads_pictures(config) and not pictures:
                _keep_text(model)
            if value_head:
                _put_value_head(model, dtype)
    except Exception as error:  # a model's code does not check its config: a division by zero, a negative dimension
        raise ModelError(
            f"transformers cannot build a {config.model_type} model from this config "
            f"({one_line(error)}); correct its fields"
        ) from error
    finally:
        handle.remove()
    precise = re.compile("|".join([*(model._keep_in_fp32_modules_strict or ()), BIASES]))
    for name, buffer in stored_buffers(model).items():
        if not buffer.is_floating_point():
            raise ModelError(
                f"{type(model).__name__} stores {buffer.dtype} values in the buffer {name!r}; CoreRL loads, saves and "
                "sends floating-point weights only"
            )
        buffer.data = buffer.data.to(torch.float32 if precise.search(name) else compute or dtype)
    return model


def build_tower(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """What reads the pictures of `config`'s model, without its text decoder and head: parameters on meta in `dtype`,
    real buffers on the CPU. Raises ModelError as `build_on_meta` does."""
    model = build_on_meta(config, dtype=dtype, attention=own_attention(config), pictures=True)
    text = (model.get_decoder(), model.get_output_embeddings())
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if any(child is each for each in text):
                setattr(module, name, None)
    return model


def own_attention(config: PreTrainedConfig) -> str:
    """The fastest attention that transformers has for the model on every device."""
    return "sdpa" if getattr(architecture_of(config), "_supports_sdpa", False) else "eager"


def architecture_of(config: PreTrainedConfig) -> Any:
    """The class of the model that `build_on_meta` builds."""
    return _auto_class(config)._model_mapping[type(config)]


def _auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM


def _attentions(config: PreTrainedConfig, attention: str, *, towers: bool) -> str | dict[str, str]:
    """`attention`, by the names of the parts' configs if some of these parts read no text. `towers` get it where they
    have it; else they get one that each has, as transformers builds no part with an attention that it lacks, although
    it is removed afterwards."""
    if not reads_pictures(config):
        return attention
    text = config.get_text_config()
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    own = {
        name: attention
        if part.get_text_config() is text or (towers and attention == "sdpa" and _has_sdpa(part))
        else "eager"
        for name, part in parts.items()
    }
    return {"": attention, **own}


def _has_sdpa(part: PreTrainedConfig) -> bool:
    """Whether the part of a model that this config is of has torch's attention; the whole model says that it has."""
    known: Any = AutoModel._model_mapping
    return bool(getattr(known[type(part)], "_supports_sdpa", False)) if type(part) in known else True


def _keep_text(model: PreTrainedModel) -> None:
    """Remove all weights outside of the text decoder and its head: towers and projectors."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    kept = {module for part in parts if part is not None for module in part.modules()}

    def prune(module: nn.Module) -> None:
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            setattr(module, name, None)
        for name, child in list(module.named_children()):
            if kept.isdisjoint(child.modules()):
                delattr(module, name)
            elif child not in kept:
                prune(child)

    if model not in kept:
        prune(model)


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a model's files hold, by name: weights that no gradient trains, such as the biases by which
    some routers balance their experts."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that a model's files hold, by name: its parameters, tied ones once, and then its stored buffers."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def _silence(config: PreTrainedConfig) -> None:
    """Turn off dropout and other noise, with which a pass's log-probs would match no engine and no other pass."""
    # Engines sample without noise, and so does transformers in `eval()`. Only Phi-MoE reads its router_jitter_noise
    # there too, as the margin within which experts are not masked, and samples experts by it in `train()`: neither 0
    # nor the config's value gives an engine's log-probs in training, so `parts` refuses it.
    text = config.get_text_config()
    parts = [getattr(text, name, None) for name in text.sub_configs]  # of DBRX's attention and experts
    for part in (config, text, *(each for each in parts if each is not None)):
        for name, value in list(vars(part).items()):
            if isinstance(value, int | float) and value and any(word in name for word in NOISE):
                setattr(part, name, type(value)(0))


def _put_value_head(model: PreTrainedModel, dtype: torch.dtype) -> None:
    language_head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is language_head)
    parent, _, attribute = name.rpartition(".")
    delattr(model.get_submodule(parent), attribute)
    hidden = model.config.get_text_config().hidden_size
    model.add_module(VALUE_HEAD, nn.Linear(hidden, 1, bias=False, dtype=dtype))


def _to_meta(module: nn.Module, name: str, param: nn.Parameter | None, *, kept: int) -> Any:
    """The parameter on meta, or None to keep it as it is, as are those of fewer than `kept` dims. (torch's stubs say
    that hooks return nothing.)"""
    if param is not None and param.is_meta:
        param._is_hf_initialized = True  # type: ignore[attr-defined]  # as below
    if param is None or param.is_meta or param.dim() < kept:
        return None  # a tied parameter must remain the same object under both names
    on_meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    on_meta._is_hf_initialized = True  # type: ignore[attr-defined]  # else transformers draws values for it, in vain
    return on_meta


def materialize(model: nn.Module, tensors: Mapping[str, nn.Parameter]) -> None:
    """Replace the model's parameters with `tensors`, keyed by the names of `model.named_parameters()`.

    A tied parameter is named once and stays one object everywhere; in a model with adapters, what takes the place of a
    frozen one is frozen. Raises ModelError unless names and shapes are exactly the model's.
    """
    old = dict(model.named_parameters())
    if old.keys() != tensors.keys():
        missing, unknown = sorted(old.keys() - tensors.keys()), sorted(tensors.keys() - old.keys())
        raise ModelError(
            f"the tensors do not match the model's parameters: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    adapted = any(hasattr(module, "lora_A") for module in model.modules())
    for name, param in old.items():
        if param.shape != tensors[name].shape:
            raise ModelError(f"{name} has shape {list(tensors[name].shape)}, the model needs {list(param.shape)}")
        if adapted and not param.requires_grad:
            tensors[name].requires_grad_(False)
    new = {id(param): tensors[name] for name, param in old.items()}
    for module in model.modules():
        for name, slot in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, new[id(slot)])


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to `device`; parameters are not moved."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The decoder's layers: its ModuleList of that name, or else the one with the most parameters. Raises ModelError if
    there is none."""
    decoder = model.get_decoder()
    for name in ("layers", "h"):  # GPT-2 and similar models use the second
        if isinstance(layers := getattr(decoder, name, None), nn.ModuleList):
            return list(layers)
    lists: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ModelError(f"cannot find the layers of {type(decoder).__name__}: it has no ModuleList")
    return list(max(lists, key=lambda each: sum(param.numel() for param in each.parameters())).children())


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of each decoder layer; the backward pass recomputes its other activations."""
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
