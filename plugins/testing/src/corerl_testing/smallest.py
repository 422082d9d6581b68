"""The smallest config of any model type of transformers in which every kind of layer of the family occurs, and a model
of it with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from corerl.models.build import named_weights

# Fields of all families -> what they are at most. Two experts of eight, a window shorter than a test's sequences.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_seq_len", "model_max_length"), 128
    ),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "lru_width"), 64),
    **dict.fromkeys(
        (
            "intermediate_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "ffn_hidden_size",
            "feed_forward_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "dff",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
            "embedding_size",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_value_heads",
            "linear_num_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "linear_num_key_heads",
            "index_n_heads",
            "n_mamba_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "global_head_dim",
            "swa_head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "index_head_dim",
            "query_pre_attn_scalar",
            "hidden_size_per_layer_input",
        ),
        16,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "n_group", "num_expert_group"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank"), 16),
    "q_lora_rank": 24,
    "qk_head_dim": 24,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "mamba_head_dim", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "window_size",
            "attention_window_size",
            "attention_chunk_size",
            "local_attention",
            "mamba_chunk_size",
            "chunk_size",
            "index_topk",
            "rotary_dim",
        ),
        8,
    ),
    "num_nextn_predict_layers": 0,
}
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)
# Fields that make layers dense or of experts; the first shall be dense.
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
OF_EXPERTS: Mapping[str, Sequence[int]] = {"moe_layers": (1,), "mlp_only_layers": (0,)}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What some types need besides: sizes that must agree, and fields whose defaults their own code cannot build.
OWN: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    # Published models have it, and their class's default is neutral.
    **{each: {"logits_scaling": 2.0} for each in ("granite", "granitemoe", "granitemoeshared")},
    # Queries are scaled by the number of their token, in layers without rotary positions.
    **{each: {"floor_scale": 8, "no_rope_layers": [1, 0]} for each in ("llama4", "llama4_text")},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"logits_scaling": 2.0, "layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    # Rotary positions of three axes, whose sections add up to half of a head.
    **{
        f"{each}_text": {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
        for each in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm_ocr", "paddleocr_vl")
    },
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
}


def smallest_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """A config with about two layers and 97 tokens, or more layers if the type has more kinds of them; `fields` set
    further fields. Raises whatever the type's own config does if it cannot be made this small."""
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config()
    small = _shrunk({name: value for name, value in vars(text).items() if name[0] != "_"})
    small |= {**OWN.get(text.model_type, {}), **fields}
    if text is default:
        return AutoConfig.for_model(model_type, **small)
    part = next(name for name, value in vars(default).items() if value is text)
    return AutoConfig.for_model(model_type, **{part: small})


def drawn_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with the float32 weights that transformers draws, and its slowest attention. Norms, biases and buffers,
    initially ones and zeros, get noise, so that mixed-up tensors show. Without training noise: it is in evaluation
    mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for weight in named_weights(model).values():
                if weight.dim() == 1:
                    weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def _shrunk(default: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, most in SIZES.items():
        value = default.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, most)
    heads, shared = default.get("num_attention_heads"), default.get("num_key_value_heads")
    if "num_key_value_heads" in small and heads == shared:  # of multi-head and latent attention
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "qk_rope_head_dim" in small and default.get("head_dim") == default["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    small |= {name: number for name, number in SPECIAL.items() if default.get(name) is not None}
    small |= {name: 1 for name in DENSE_FIRST if isinstance(default.get(name), int)}
    small |= {name: list(layers) for name, layers in OF_EXPERTS.items() if isinstance(default.get(name), list)}
    if default.get("is_decoder") is False:
        small["is_decoder"] = True
    layers = next((default[name] for name in LAYERS if isinstance(default.get(name), int)), 0)
    lists = {name: value for name, value in default.items() if isinstance(value, Sequence) and len(value) == layers > 1}
    lists = {name: value for name, value in lists.items() if name not in OF_EXPERTS and not isinstance(value, str)}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True))) if lists else []
    if default.get("num_kv_shared_layers"):  # the last layers use keys and values of earlier ones of their kind
        small["num_kv_shared_layers"] = len(kinds)
        kinds += kinds
    count = max(2, len(kinds))
    kinds += kinds[-1:] * (count - len(kinds))
    for column, name in enumerate(lists):
        chosen = [row[column] for row in kinds]
        small[name] = [min(value, SIZES[name]) for value in chosen] if name in SIZES else chosen
    small |= {name: count for name in LAYERS if isinstance(default.get(name), int)}
    return small
