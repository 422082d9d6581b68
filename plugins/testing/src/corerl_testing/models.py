"""Tiny models of every kind that CoreRL trains, for tests: built in milliseconds, with no two tensors alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from corerl_testing.smallest import drawn_model

KINDS = ("qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe")
BUFFERS = "glm4-moe"  # has weights in buffers
DEEP = "-deep"  # ends the name of a kind with twice the layers
MODELS = (*KINDS, BUFFERS, f"qwen3{DEEP}", f"qwen3-tied{DEEP}", f"qwen3-moe{DEEP}")

_COMMON: dict[str, Any] = {
    "vocab_size": 97,  # a prime, so that shards are uneven
    "hidden_size": 64,
    "num_hidden_layers": 2,  # the first and the last
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3-tied": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {},  # has biases
    "llama": {"head_dim": 16, "pad_token_id": 5},  # occurs in samples, and its embedding is not trained
    "qwen3-moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "glm4-moe": {  # a dense layer, then one of experts, with its router's bias in a buffer
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
}


def tiny_fields(kind: str) -> dict[str, Any]:
    """The `[model.config]` of this kind: about 0.1 million parameters, 2 layers, 97 tokens; 4 layers if it is DEEP."""
    kind, deep = kind.removesuffix(DEEP), kind.endswith(DEEP)
    model_type = {"qwen3-tied": "qwen3"}.get(kind, kind.replace("-", "_"))
    return {"model_type": model_type, **_COMMON, **_OWN[kind], **({"num_hidden_layers": 4} if deep else {})}


def tiny_config(kind: str) -> PreTrainedConfig:
    """`tiny_fields(kind)` as transformers' config class."""
    return AutoConfig.for_model(**tiny_fields(kind))


def write_tiny_model(kind: str, directory: str | Path, seed: int = 0) -> Path:
    """Save a `drawn_model` of this kind with transformers, in several shards with an index; returns `directory`."""
    drawn_model(tiny_config(kind), seed).save_pretrained(directory, max_shard_size="200KB")
    return Path(directory)
