"""Load the transformers configuration that `[model]` describes, from a directory or from fields; never downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from corerl.errors import ModelError
from corerl.kinds import experts_of
from corerl.messages import did_you_mean, one_line

if TYPE_CHECKING:
    from corerl.config.schema import ModelConfig

# Fields that a config takes although its class does not declare them: older names, which become `rope_parameters` and
# `dtype`, and head_dim, which the modeling code of some models (Qwen3-MoE) reads if present.
UNDECLARED = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "head_dim"})
CODE = ("auto_map", "custom_pipelines")  # fields of a config.json that name code in its directory
# Fields that say how many experts a token is sent to: most models', Gemma 4's, Aria's and Hunyuan's, DBRX's.
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
POSITIONS = ("max_position_embeddings", "max_seq_len")  # fields that say how many tokens a sequence may have


def hf_config(model: ModelConfig) -> PreTrainedConfig:
    """The config of `model.path`, or else of the fields in `model.config`; `architectures` is `class_name`.

    `tie_word_embeddings` is False where the files have a head of their own, and `pad_token_id` is None where the model
    has no embedding for it, so that what is built and exported is what transformers would train.

    Raises ModelError if neither is given, if config.json is missing or unreadable, if the model is quantized, and for a
    model type or a field that transformers does not know, or, without `pictures`, fields of a model that reads them.
    """
    if model.path:
        config = _from_directory(model.path)
    elif model.config:
        config = _from_fields(model.config)
    else:
        raise ModelError(
            "no model: set model.path to a Hugging Face directory, or model.config to the fields of a config"
        )
    _require_counts(config, f"model.path={model.path!r}: config.json: " if model.path else "model.config.")
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "?") if isinstance(quantized, Mapping) else "?"
        raise ModelError(
            f"model.path={model.path!r} is quantized ({method}), which CoreRL does not support; use the original model "
            "in 16 or 32 bits"
        )
    if model.pictures and (seeing := MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)):
        config.architectures = [seeing]  # some types have a causal class too, which reads text alone
    # A config made from fields names no architecture, and no engine can load an export without one.
    config.architectures = [class_name(config)]
    # Without pictures these parts would be in no checkpoint, and no export would load.
    if not (model.path or model.pictures) and reads_pictures(config):
        text = config.get_text_config().model_type
        known = text in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and text != config.model_type
        raise ModelError(
            f"model_type {config.model_type!r} has parts for pictures ({class_name(config)}), which a run on text does "
            f"not train, so that they cannot begin at random; {f'use model_type {text!r}, or ' if known else ''}set "
            "model.path"
        )
    _forget(config)
    if model.path:
        from corerl.models.files import untied_head  # imports transformers' models, which takes seconds

        if untied_head(config, model.path):
            for part in (config, config.get_text_config()):
                part.tie_word_embeddings = False
    return config


def class_name(config: PreTrainedConfig) -> str:
    """The class of transformers that models of `config` are: the one that `architectures` names if transformers has it
    for this model type as a causal or as an image-text model, else the causal one, else the other. Raises ModelError if
    it has neither."""
    kinds = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    known = [names[config.model_type] for names in kinds if config.model_type in names]
    if not known:
        own = MODEL_MAPPING_NAMES.get(config.model_type, ())
        classes = " or ".join([own] if isinstance(own, str) else own)
        raise ModelError(
            f"model_type {config.model_type!r} is neither a causal language model nor an image-text model in "
            f"transformers {transformers.__version__}, which has {classes or 'no model'} for it; use a checkpoint of a "
            "type that `corerl models` lists, and in place of a checkpoint's part the whole one"
        )
    named = config.architectures if isinstance(config.architectures, list) else ()
    return next((name for name in named if name in known), known[0])


def reads_pictures(config: PreTrainedConfig) -> bool:
    """Whether models of `config` have parts for pictures, which a run on text does not need."""
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return name is not None and name == class_name(config)


def context_length(config: PreTrainedConfig) -> int | None:
    """Maximum tokens of a sequence by the model's own config; None if it sets no limit."""
    text = config.get_text_config()
    return next((size for name in POSITIONS if (size := getattr(text, name, None)) is not None), None)


def topk_of(config: PreTrainedConfig) -> int:
    """The number of experts that a layer of the text decoder sends a token to; 0 for a dense model."""
    text = config.get_text_config()
    parts = (text, getattr(text, "ffn_config", None))  # the second is DBRX's
    found = next((found for part in parts for name in CHOSEN if (found := getattr(part, name, None))), 0)
    return int(max(found) if isinstance(found, list) else found)  # Hunyuan lists every layer's


def _require_counts(config: PreTrainedConfig, where: str) -> None:
    """Raise ModelError for heads that cannot share keys and values, or more experts for a token than there are, which
    fail in a forward pass."""
    text = config.get_text_config()
    chosen, experts = getattr(text, "num_experts_per_tok", None), experts_of(text.to_dict())
    if isinstance(chosen, int) and 0 < experts < chosen:
        raise ModelError(f"{where}num_experts_per_tok={chosen}, wanted at most {experts}, the number of experts")
    try:
        heads, shared = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    except RuntimeError:  # transformers' own, for models whose layers differ in these
        return
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise ModelError(f"{where}num_key_value_heads={shared} does not divide num_attention_heads={heads}")


def _forget(config: PreTrainedConfig) -> None:
    """Remove a pad token that the model has no embedding for: torch would not build it, and CoreRL never pads. And the
    references to Python files of the model's directory, which are never imported: what is built from this config, or
    reads an export of it, cannot ask for them."""
    for part in (config, config.get_text_config()):
        size, pad = getattr(part, "vocab_size", None), getattr(part, "pad_token_id", None)
        if isinstance(size, int) and isinstance(pad, int) and not 0 <= pad < size:
            part.pad_token_id = None
        for name in CODE:
            if hasattr(part, name):
                delattr(part, name)


def _from_directory(path: str) -> PreTrainedConfig:
    file = Path(path) / "config.json"
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(
            f"model.path={path!r}: {error.filename or file} cannot be read: {error.strerror}; it must be the directory "
            "of a Hugging Face model on this machine"
        ) from error
    if not isinstance(fields, dict):
        raise ModelError(f"{file} contains a {type(fields).__name__}, expected the fields of a Hugging Face config")
    _known_type(fields, str(file), "; the code that its auto_map names is never run" if fields.get("auto_map") else "")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each config class raises whatever its own checks do
        raise ModelError(f"transformers cannot read {file}: {one_line(error)}") from error
    return config


def _from_fields(given: Mapping[str, Any]) -> PreTrainedConfig:
    fields = dict(given)
    model_type = _known_type(fields, "model.config")
    del fields["model_type"]
    try:
        default = AutoConfig.for_model(model_type)
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # each config class raises whatever its own checks do
        raise ModelError(f"model.config is not a valid {model_type} config: {one_line(error)}") from error
    # transformers silently keeps unknown fields, so a misspelled one would train another model.
    known = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map) | UNDECLARED
    for name in fields:
        if name not in known:
            raise ModelError(f"model.config.{name} is not a field of a {model_type} config{did_you_mean(name, known)}")
    return config


def _known_type(fields: Mapping[str, Any], where: str, more: str = "") -> str:
    """The model type. Raises ModelError, ending in `more`, if transformers does not know it."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{where} has no model_type; transformers needs one, such as 'qwen3' or 'llama'")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{where}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
            f"{did_you_mean(model_type, CONFIG_MAPPING)}{more}"
        )
    return model_type


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
