"""Translate a Hugging Face config to Megatron's for the known model families, and refuse all others.

Imports neither megatron-core nor torch, so that an impossible run is refused before it takes a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from corerl.models.experts import experts_of

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPES = ("default", "linear", "llama3")
# Parameters of Llama 3's rope that megatron-core hard-codes.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def unsupported_by(hf: Mapping[str, Any]) -> str:
    """Why this model (the fields of its Hugging Face config) cannot be trained here; "" if it can."""
    family = hf.get("model_type")
    if family not in FAMILIES:
        return (
            f"model_type {family!r} is not supported by this backend, only {', '.join(FAMILIES)}; use another backend"
        )
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf.get(field):
            return f"{field} of a {family} model is not supported by this backend; use another one"
    if hf.get("hidden_act", "silu") != "silu":
        return f"hidden_act={hf['hidden_act']!r} is not supported by this backend, only silu; use another one"
    rope = _rope(hf)
    kind = rope.get("rope_type", "default")
    if kind not in ROPES:
        return f"rope_type {kind!r} is not supported by this backend, only {', '.join(ROPES)}; use another backend"
    if kind == "llama3":
        for field, fixed in LLAMA3.items():
            if rope[field] != fixed:
                return (
                    f"rope {field}={rope[field]} is not supported by megatron-core, only {fixed}; use another backend"
                )
    if experts_of(hf) and hf["num_experts_per_tok"] == 1 and hf["norm_topk_prob"]:
        # transformers gives that expert the weight 1; megatron-core refuses a softmax over one.
        return (
            "norm_topk_prob=true with num_experts_per_tok=1, which leaves the router no gradient, is not supported by "
            "this backend; set norm_topk_prob to false, or use another backend"
        )
    return ""


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = hf.get("rope_parameters")  # in transformers 5; two fields before that
    return found or {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {})}


@frozen(kw_only=True)
class Architecture:
    """A model in Megatron's terms."""

    transformer: Mapping[str, Any]  # arguments of TransformerConfig
    gpt: Mapping[str, Any]  # arguments of GPTModel
    vocabulary: int  # rows of the embedding, without padding
    padding: int | None  # the token whose embedding is not trained as an input
    tied: bool
    experts: int  # in a layer; 0 for a dense model


def architecture(hf: Mapping[str, Any], *, value_head: bool) -> Architecture:
    """The architecture of a model that `unsupported_by` accepts. A critic ties no weights."""
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    family = hf["model_type"]
    transformer = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf.get("head_dim") or hidden // heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family.startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    experts = experts_of(hf)
    if experts:
        dense = set(hf.get("mlp_only_layers") or ())
        step = hf.get("decoder_sparse_step", 1)
        transformer |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_layer_freq": [
                int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf["num_hidden_layers"])
            ],
            # transformers takes the softmax over all experts; renormalized over the chosen ones, it is their softmax.
            "moe_router_pre_softmax": not hf["norm_topk_prob"],
            "moe_router_dtype": "fp32",
        }
    tied = bool(hf["tie_word_embeddings"]) and not value_head
    rope = _rope(hf)
    gpt: dict[str, Any] = {
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": tied,
    }
    match rope.get("rope_type", "default"):
        case "llama3":
            gpt |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        case "linear":
            gpt |= {"seq_len_interpolation_factor": rope["factor"]}
    return Architecture(
        transformer=transformer,
        gpt=gpt,
        vocabulary=hf["vocab_size"],
        # transformers passes it to torch's embedding as padding_idx, where a negative index counts from the end.
        padding=None if hf.get("pad_token_id") is None else hf["pad_token_id"] % hf["vocab_size"],
        tied=tied,
        experts=experts,
    )
