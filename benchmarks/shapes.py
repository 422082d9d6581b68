"""Shapes of models: fields of transformers' configs. Weights are random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def shape(model_type: str, *sizes: int | None, **more: Any) -> dict[str, Any]:
    """A config's fields with these SIZES; None leaves one to transformers."""
    own = {name: size for name, size in zip(SIZES, sizes, strict=True) if size is not None}
    return {"model_type": model_type, **own, **more}


COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TIED = {**COMMON, "tie_word_embeddings": True}
QWEN3_8B = shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, **COMMON)
QWEN3_4B = shape("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, **TIED)
QWEN3_600M = shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, **TIED)
QWEN3_90M = shape("qwen3", 40000, 640, 1792, 14, 10, 5, 64, **TIED)  # 26 M parameters and 4.6 M a layer
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
QWEN3_30B_A3B = shape("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, **COMMON, **EXPERTS)
SLICE = {**QWEN3_8B, "num_hidden_layers": 8}  # 2.79 B parameters
# Of examples/quickstart.toml, 0.1 M parameters, and one 40 times as large.
QUICKSTART = shape("qwen3", 16, 64, 192, 2, 4, 2, 32, max_position_embeddings=512, tie_word_embeddings=True)
QWEN3_4M = shape("qwen3", 2000, 256, 768, 4, 8, 4, 32, max_position_embeddings=512, tie_word_embeddings=True)
SMOLLM2_135M = {
    **shape("llama", 49152, 576, 1536, 30, 9, 3, 64, **TIED),
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "max_position_embeddings": 8192,
}
BLOOM_1B1 = shape("bloom", 250880, 1536, None, 24, 16, None, None)  # positions in its attention: it is not packed
GEMMA3_1B = {  # windows of 512 tokens in five of six layers
    **shape("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, sliding_window=512),
    "layer_types": ((["sliding_attention"] * 5 + ["full_attention"]) * 5)[:26],
}
QWEN3_5_SLICE = {  # 8 layers of Qwen3.5 0.8B, gated delta nets in three of four
    **shape("qwen3_5_text", 248320, 1024, 3584, 8, 8, 2, 256, tie_word_embeddings=True),
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}
GPT_OSS_SLICE = {  # 8 layers with 8 experts; sinks, and windows of 128 tokens in every other layer
    **shape("gpt_oss", 201088, 2880, 2880, 8, 64, 8, 64, sliding_window=128),
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": QWEN3_600M,
    "4b": QWEN3_4B,
    "8b": QWEN3_8B,
    "30b-a3b": QWEN3_30B_A3B,
}  # of benchmarks of updates and runs

TINY = {
    **dict(zip(SIZES, (97, 64, 96, 4, 4, 2, 16), strict=True)),
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def tiny_shape(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same kind of model in a size for CPUs."""
    small = {**fields, **{name: value for name, value in TINY.items() if name in fields}}
    if "layer_types" in fields:  # the first six have every kind
        small |= {"num_hidden_layers": 6, "layer_types": fields["layer_types"][:6]}
    return small
