"""Tiny checkpoints of eight families that read pictures, as their publishers' files have them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
HALF = {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "final_logit_softcapping": 30.0}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
PATCHES = {"depth": 1, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
WINDOWED = {"depth": 1, "num_heads": 2, "window_size": 16, "fullatt_block_indexes": [0]}
CLIPPED = {"num_hidden_layers": 1, "num_attention_heads": 2, "use_clipped_linears": True}
PLACEHOLDERS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
        "vision_config": {**TOWER, **PATCHES, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        **PLACEHOLDERS,
    },
    "qwen3_5": {
        "text_config": {**TEXT, **STATES, "rope_parameters": {**HALF, "mrope_interleaved": True}},
        "vision_config": {**TOWER, **PATCHES, "out_hidden_size": 32},
        **PLACEHOLDERS,
    },
    "gemma3": {
        "text_config": {**TEXT, **WINDOWS},
        "vision_config": {**TOWER, **LAYERS, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 6,
        "eoi_token_index": 7,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**TOWER, **LAYERS, "head_dim": 8, "model_type": "pixtral"},
        "image_token_index": 5,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**TOWER, **WINDOWED, "out_hidden_size": 32},
        **PLACEHOLDERS,
    },
    "glm4v": {
        "text_config": {**TEXT, "rope_parameters": HALF, "tie_word_embeddings": False},
        "vision_config": {**TOWER, "depth": 1, "num_heads": 2, "image_size": 16, "out_hidden_size": 32},
        "image_token_id": 5,
        "video_token_id": 6,
        "tie_word_embeddings": False,
    },
    "gemma4": {
        "text_config": {**TEXT, **SHARED, **PER_LAYER, "sliding_window": 8, "global_head_dim": 16, "pad_token_id": 0},
        "vision_config": {**TOWER, **CLIPPED, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 16, **CLIPPED, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16},
        "image_token_id": 5,
        "video_token_id": 6,
        "audio_token_id": 7,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2", "tie_word_embeddings": False},
        "vision_config": {**TOWER, **LAYERS},
        "image_token_id": 5,
        "tie_word_embeddings": False,
    },
}
# In the names of tensors that no text passes through: the last are keys and values that Gemma 4's later layers lack.
OF_PICTURES = (
    *("visual", "vision_tower", "multi_modal_projector", "embed_vision", "audio"),
    *(f"layers.{layer}.self_attn.{name}" for layer in (2, 3) for name in ("k_proj", "v_proj", "k_norm")),
)
PROCESSOR = {
    "preprocessor_config.json": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}},
    "processor_config.json": {"image_seq_length": 4},
    "chat_template.json": {"chat_template": "{{ messages }}"},
}


def pictures_config(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{"tie_word_embeddings": True, **FAMILIES[family]})


def write_pictures(family: str, directory: Path, *, config: PreTrainedConfig | None = None) -> Path:
    """Save such a model, or one of `config`, with noise in vectors and zeros, and the files of its processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config or pictures_config(family), dtype=torch.float32)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1 or not param.any():  # Gemma 3's projector begins with zeros, and would be blind
                    param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(directory)
    as_published(family, directory)
    for name, content in PROCESSOR.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def as_published(family: str, directory: Path) -> None:
    """Name weights and settings as the family's published files do, and not as today's transformers."""
    tensors, file = tensors_in(directory), directory / "config.json"
    config = json.loads(file.read_text())
    text, vision = config["text_config"], config["vision_config"]
    if family == "gemma3":
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): tensors[name] for name in tensors}
    if family == "gemma4":  # has keys and values of layers that take them from earlier ones
        for layer, name in itertools.product((2, 3), ("k_proj", "v_proj", "k_norm")):
            own = f"model.language_model.layers.{layer - 2}.self_attn.{name}.weight"
            tensors[own.replace(f".{layer - 2}.", f".{layer}.")] = 0.5 * tensors[own]
    if family == "mistral3":
        vision["rope_theta"] = vision.pop("rope_parameters")["rope_theta"]
    if family == "qwen2_5_vl":  # has the fields of the text decoder beside those of the tower
        rope = text.pop("rope_parameters")
        text |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        }
        config = {**config.pop("text_config"), **config}
    if family == "internvl":  # says for the text decoder alone that the head is its own
        del config["tie_word_embeddings"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(config))


def tensors_in(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def of_pictures(name: str) -> bool:
    return any(part in name for part in OF_PICTURES)
