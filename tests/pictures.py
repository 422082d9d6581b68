"""Tiny checkpoints of four families that read pictures, as transformers saves them."""

from __future__ import annotations

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
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
HALF = {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
PATCHES = {"depth": 1, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
PLACEHOLDERS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
# Families whose files name tensors as the model does, and others.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**TOWER, **PATCHES, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        **PLACEHOLDERS,
    },
    "qwen3_5": {
        "text_config": {**TEXT, **STATES, "rope_parameters": HALF},
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
}
OF_PICTURES = ("visual", "vision_tower", "multi_modal_projector")  # in the names of tensors
PROCESSOR = {
    "preprocessor_config.json": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}},
    "processor_config.json": {"image_seq_length": 4},
    "chat_template.json": {"chat_template": "{{ messages }}"},
}


def pictures_config(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **FAMILIES[family], tie_word_embeddings=True)


def write_pictures(family: str, directory: Path, *, config: PreTrainedConfig | None = None) -> Path:
    """Save such a model, or one of `config`, with noise in vectors, and the files of its processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config or pictures_config(family), dtype=torch.float32)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(directory)
    as_published(family, directory)
    for name, content in PROCESSOR.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def as_published(family: str, directory: Path) -> None:
    """Name weights and settings of the tower as the family's published files do, and not as today's transformers."""
    if family == "gemma3":
        tower = "vision_tower."
        renamed = {name.replace(tower, f"{tower}vision_model."): each for name, each in tensors_in(directory).items()}
        save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    if family == "mistral3":
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config["vision_config"]["rope_theta"] = config["vision_config"].pop("rope_parameters")["rope_theta"]
        file.write_text(json.dumps(config))


def tensors_in(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def of_pictures(name: str) -> bool:
    return any(part in name for part in OF_PICTURES)
