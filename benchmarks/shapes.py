"""Shapes of models: fields of transformers' configs. Weights are random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_8B = {
    **COMMON,
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
QWEN3_4B = {**QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_600M = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    **COMMON,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
SLICE = {**QWEN3_8B, "num_hidden_layers": 8}  # 2.79 B parameters
QUICKSTART = {  # of examples/quickstart.toml, 0.1 M parameters
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
QWEN3_4M = {
    **QUICKSTART,
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SMOLLM2_135M = {
    **COMMON,
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
BLOOM_1B1 = {  # positions are part of its attention, so it cannot be packed
    "model_type": "bloom",
    "vocab_size": 250880,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
GEMMA3_1B = {  # windows of 512 tokens in five of six layers
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": ((["sliding_attention"] * 5 + ["full_attention"]) * 5)[:26],
}
QWEN3_5_SLICE = {  # 8 layers of Qwen3.5 0.8B, gated delta nets in three of four
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "tie_word_embeddings": True,
}
GPT_OSS_SLICE = {  # 8 layers with 8 experts; sinks, and windows of 128 tokens in every other layer
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": QWEN3_600M,
    "4b": QWEN3_4B,
    "8b": QWEN3_8B,
}  # of benchmarks of updates and runs

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def tiny_shape(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same kind of model in a size for CPUs."""
    small = {**fields, **{name: value for name, value in TINY.items() if name in fields}}
    if fields.get("head_dim", 0) > 256:  # more than a kernel takes, which is what such a shape is for
        small |= {"head_dim": fields["head_dim"], "num_hidden_layers": 1}
    if "layer_types" in fields:  # the first six have every kind
        small |= {"num_hidden_layers": 6, "layer_types": fields["layer_types"][:6]}
    return small
