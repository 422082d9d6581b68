"""Translate a Hugging Face config to Megatron's for the known model families, and refuse all others.

A family is described by the parts of its layers. Imports neither megatron-core nor torch, so that an impossible run is
refused before it takes a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

from attrs import field, frozen

from corerl.models import experts_of

Fields: TypeAlias = Mapping[str, Any]  # of a Hugging Face config
ROPES = ("default", "linear", "llama3", "yarn")
LATENT_ROPES = ("default", "yarn")
# Parameters of Llama 3's rope that megatron-core hard-codes.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GELU = "gelu_pytorch_tanh"
BRIDGE_INSTALL = (
    "with Python 3.12: python -m pip install --no-deps 'megatron-bridge>=0.6,<0.7', and what docs/backends/megatron.md "
    "names beside it"
)
SWIGLU_ALPHA = 1.702  # likewise, of its quick_gelu

# Families of Megatron-Bridge (0.6) whose models are wrong, or not built, over tensor-parallel ranks.
UNSPLIT = {
    "minimax_m2": "Megatron-Bridge's norms of all heads of a minimax_m2 model are summed over ranks without a gradient",
    "olmoe": "Megatron-Bridge's norms of all heads of an olmoe model are those of one rank",
}


class Part(Enum):
    """What one or several Hugging Face tensors of a layer are."""

    INPUT_NORM = auto()
    QKV = auto()
    QKV_BIAS = auto()
    Q_NORM = auto()
    K_NORM = auto()
    Q = auto()  # of latent attention, as the next five
    Q_DOWN = auto()
    Q_UP = auto()
    KV_DOWN = auto()
    KV_NORM = auto()
    KV_UP = auto()
    SINKS = auto()
    PROJ = auto()  # from heads to hidden values
    PROJ_BIAS = auto()
    PROJ_NORM = auto()  # of what attention adds
    MLP_NORM = auto()
    FC1 = auto()  # gate and up
    FC2 = auto()  # down
    FC2_NORM = auto()  # of what the MLP adds
    ROUTER = auto()
    ROUTER_BIAS = auto()
    CHOICE_BIAS = auto()  # by which a router chooses experts without weighing them
    EXPERT_FC1 = auto()
    EXPERT_FC1_BIAS = auto()
    EXPERT_FC2 = auto()
    EXPERT_FC2_BIAS = auto()
    SHARED_FC1 = auto()
    SHARED_FC2 = auto()
    SHARED_GATE = auto()


def _projections(prefix: str, suffix: str = "weight") -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}_proj.{suffix}" for name in "qkv")


def _gated(prefix: str, gate: str = "gate_proj", up: str = "up_proj") -> tuple[str, str]:
    return f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight"


# Names after model.layers.N., with {expert}. One name instead of several: they are one tensor, one below the other.
NAMES: Mapping[Part, tuple[str, ...]] = {
    Part.INPUT_NORM: ("input_layernorm.weight",),
    Part.QKV: _projections("self_attn"),
    Part.QKV_BIAS: _projections("self_attn", "bias"),
    Part.Q_NORM: ("self_attn.q_norm.weight",),
    Part.K_NORM: ("self_attn.k_norm.weight",),
    Part.SINKS: ("self_attn.sinks",),
    Part.PROJ: ("self_attn.o_proj.weight",),
    Part.PROJ_BIAS: ("self_attn.o_proj.bias",),
    Part.MLP_NORM: ("post_attention_layernorm.weight",),
    Part.FC1: _gated("mlp"),
    Part.FC2: ("mlp.down_proj.weight",),
    Part.ROUTER: ("mlp.gate.weight",),
    Part.CHOICE_BIAS: ("mlp.gate.e_score_correction_bias",),
    Part.EXPERT_FC1: _gated("mlp.experts.{expert}"),
    Part.EXPERT_FC2: ("mlp.experts.{expert}.down_proj.weight",),
    Part.SHARED_FC1: _gated("mlp.shared_experts"),
    Part.SHARED_FC2: ("mlp.shared_experts.down_proj.weight",),
}


LATENT: Mapping[Part, tuple[str, ...]] = {
    Part.Q: ("self_attn.q_proj.weight",),
    Part.Q_DOWN: ("self_attn.q_a_proj.weight",),
    Part.Q_NORM: ("self_attn.q_a_layernorm.weight",),
    Part.Q_UP: ("self_attn.q_b_proj.weight",),
    Part.KV_DOWN: ("self_attn.kv_a_proj_with_mqa.weight",),
    Part.KV_NORM: ("self_attn.kv_a_layernorm.weight",),
    Part.KV_UP: ("self_attn.kv_b_proj.weight",),
}


def _every(hf: Fields) -> list[int]:
    return [1] * hf["num_hidden_layers"]


def _in_steps(hf: Fields) -> list[int]:
    dense, step = set(hf.get("mlp_only_layers") or ()), hf.get("decoder_sparse_step", 1)
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf["num_hidden_layers"])]


def _after_the_first(hf: Fields) -> list[int]:
    return [int(layer >= hf["first_k_dense_replace"]) for layer in range(hf["num_hidden_layers"])]


def _as_types_tell(hf: Fields) -> list[int]:
    return [int(kind == "sparse") for kind in hf["mlp_layer_types"]]


@frozen(kw_only=True)
class Experts:
    """A family's experts, and how its routers choose among them."""

    layers: Callable[[Fields], list[int]] = _every  # 1 for each layer that has experts, 0 for each dense one
    columns: str = "moe_intermediate_size"  # field: of one expert
    normalized: bool | str = True  # whether the weights of a token's experts sum to 1, or the field that says so
    # DeepSeek-V3's router: sigmoids, to which a bias is added for the choice alone, first among groups.
    sigmoid: bool = False
    shared: Callable[[Fields], int] = lambda hf: 0  # columns of the shared experts together
    shared_gate: bool = False  # whether these are weighted by a sigmoid
    # GPT-OSS's layout: one tensor [experts, in, out] for all, in which the columns of gate and up alternate.
    alternating: bool = False


@frozen(kw_only=True)
class Family:
    """What a family's layers contain besides, or instead of, Llama's parts. A string is the field that says whether."""

    qkv_bias: bool | str = False
    all_biases: bool = False  # every matrix has one, the router too
    qk_norm: bool | str = False  # of each head
    latent: bool = False  # DeepSeek-V2's attention with compressed queries, keys and values
    sinks: bool = False
    windows: bool = False  # in layers that the config tells
    partial_rope: bool = False  # of the first dims of each head
    ropeless: bool = False  # no positions in layers that `no_rope_layers` tells
    gelu: bool = False  # instead of SiLU, approximated with tanh
    centered_norms: bool = False  # the weights of norms are less by 1
    norms_after: bool = False  # attention and MLP have norms after them too
    embedding_scale: Callable[[Fields], float] = lambda hf: 1.0  # of embeddings as inputs
    rounds_scale: bool = False  # to the precision of the embeddings
    softmax_scale: Callable[[Fields], float | None] = lambda hf: None  # None: the inverse root of a head's size
    residual_scale: Callable[[Fields], float] = lambda hf: 1.0  # of what attention and MLP add
    logits_scale: Callable[[Fields], float] = lambda hf: 1.0  # by which logits are divided
    experts: Experts | None = None
    names: Mapping[Part, tuple[str, ...]] = field(factory=dict)  # where they differ from NAMES


def _sigmoid_experts(layers: Callable[[Fields], list[int]]) -> Experts:
    return Experts(
        layers=layers,
        normalized="norm_topk_prob",
        sigmoid=True,
        shared=lambda hf: hf["moe_intermediate_size"] * hf["n_shared_experts"],
    )


# Why the balancing loss cannot be added.
NO_SOFTMAX = "the routers of a {} model have no softmax, of whose probabilities this loss is; set it to 0"

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows=True),
    "ministral": Family(windows=True),
    "cwm": Family(windows=True),
    "phi3": Family(
        windows=True,
        partial_rope=True,
        names={Part.QKV: ("self_attn.qkv_proj.weight",), Part.FC1: ("mlp.gate_up_proj.weight",)},
    ),
    "granite": Family(
        embedding_scale=lambda hf: hf["embedding_multiplier"],
        softmax_scale=lambda hf: hf["attention_multiplier"],
        residual_scale=lambda hf: hf["residual_multiplier"],
        logits_scale=lambda hf: hf["logits_scaling"],
    ),
    "gemma3_text": Family(
        qk_norm=True,
        windows=True,
        gelu=True,
        centered_norms=True,
        norms_after=True,
        embedding_scale=lambda hf: hf["hidden_size"] ** 0.5,
        rounds_scale=True,
        softmax_scale=lambda hf: hf["query_pre_attn_scalar"] ** -0.5,
        names={
            Part.PROJ_NORM: ("post_attention_layernorm.weight",),
            Part.MLP_NORM: ("pre_feedforward_layernorm.weight",),
            Part.FC2_NORM: ("post_feedforward_layernorm.weight",),
        },
    ),
    "smollm3": Family(windows=True, ropeless=True),
    "seed_oss": Family(qkv_bias="attention_bias"),
    "qwen2": Family(qkv_bias=True, windows=True),
    "qwen3": Family(qk_norm=True, windows=True),
    "mixtral": Family(
        windows=True,
        experts=Experts(columns="intermediate_size"),
        names={
            Part.ROUTER: ("block_sparse_moe.gate.weight",),
            Part.EXPERT_FC1: _gated("block_sparse_moe.experts.{expert}", "w1", "w3"),
            Part.EXPERT_FC2: ("block_sparse_moe.experts.{expert}.w2.weight",),
        },
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        windows=True,
        experts=Experts(
            layers=_in_steps,
            normalized="norm_topk_prob",
            shared=lambda hf: hf["shared_expert_intermediate_size"],
            shared_gate=True,
        ),
        names={
            Part.SHARED_FC1: _gated("mlp.shared_expert"),
            Part.SHARED_FC2: ("mlp.shared_expert.down_proj.weight",),
            Part.SHARED_GATE: ("mlp.shared_expert_gate.weight",),
        },
    ),
    "qwen3_moe": Family(qk_norm=True, windows=True, experts=Experts(layers=_in_steps, normalized="norm_topk_prob")),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        partial_rope=True,
        experts=_sigmoid_experts(_after_the_first),
    ),
    "dots1": Family(qk_norm=True, windows=True, experts=_sigmoid_experts(_after_the_first)),
    "youtu": Family(latent=True, names=LATENT),
    "glm4_moe_lite": Family(latent=True, experts=_sigmoid_experts(_as_types_tell), names=LATENT),
    "deepseek_v3": Family(latent=True, experts=_sigmoid_experts(_after_the_first), names=LATENT),
    "gpt_oss": Family(
        all_biases=True,
        sinks=True,
        windows=True,
        experts=Experts(columns="intermediate_size", alternating=True),
        names={
            Part.ROUTER: ("mlp.router.weight",),
            Part.ROUTER_BIAS: ("mlp.router.bias",),
            Part.EXPERT_FC1: ("mlp.experts.gate_up_proj",),
            Part.EXPERT_FC1_BIAS: ("mlp.experts.gate_up_proj_bias",),
            Part.EXPERT_FC2: ("mlp.experts.down_proj",),
            Part.EXPERT_FC2_BIAS: ("mlp.experts.down_proj_bias",),
        },
    ),
}


def unsupported_by(hf: Fields) -> str:
    """Why this model (the fields of its Hugging Face config) cannot be trained here; "" if it can."""
    name = hf.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        return (
            f"model_type {name!r} is not supported by this backend, only {', '.join(FAMILIES)}; use another backend, "
            "or backends.megatron.bridge=true, if Megatron-Bridge knows it and it reads no pictures"
        )
    for bias in ("attention_bias", "attention_out_bias", "mlp_bias"):
        if hf.get(bias) and family.qkv_bias != bias and not family.all_biases:
            return f"{bias} of a {name} model is not supported by this backend; use another one"
    if family.all_biases and not hf.get("attention_bias", True):
        return f"attention_bias=false of a {name} model is not supported by this backend; use another one"
    activation, wanted = ("hidden_activation", GELU) if family.gelu else ("hidden_act", "silu")
    if hf.get(activation, wanted) != wanted:
        return f"{activation}={hf[activation]!r} is not supported by this backend, only {wanted}; use another one"
    for unknown in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if hf.get(unknown):
            return f"{unknown} of a {name} model is not supported by this backend; use another one"
    if hf.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        return f"swiglu_alpha={hf['swiglu_alpha']} is not supported by megatron-core, only {SWIGLU_ALPHA}"
    return _unsupported_rope(hf, family) or (_unsupported_router(hf, family.experts) if family.experts else "")


def _unsupported_rope(hf: Fields, family: Family) -> str:
    rope = _rope(hf)
    kind = rope.get("rope_type", "default")
    if (local := _local_rope(hf).get("rope_type", "default")) != "default":
        return f"rope_type {local!r} in layers with windows is not supported by this backend, only default"
    ropes = LATENT_ROPES if family.latent else ROPES
    if kind not in ropes:
        of = f" of a {hf['model_type']} model" if family.latent else ""
        return f"rope_type {kind!r}{of} is not supported by this backend, only {', '.join(ropes)}; use another backend"
    if family.latent and not hf.get("rope_interleave", True):
        return "rope_interleave=false is not supported by megatron-core; use another backend"
    if kind == "llama3":
        for name, fixed in LLAMA3.items():
            if rope[name] != fixed:
                return f"rope {name}={rope[name]} is not supported by megatron-core, only {fixed}; use another backend"
    if kind == "yarn":
        factor = rope.get("attention_factor")
        if factor is not None and not math.isclose(factor, _concentration(rope)):
            return (
                f"rope attention_factor={factor} is not supported by megatron-core, which computes "
                f"{_concentration(rope):.6g} from the other parameters; use another backend"
            )
        if family.latent and (rope.get("truncate") is False or (rope.get("mscale_all_dim") and not rope.get("mscale"))):
            return (
                "rope truncate=false, or mscale_all_dim without mscale, of latent attention is not supported by "
                "megatron-core; use another backend"
            )
        if _rotated(hf, family) != 1:
            return (
                "rope_type 'yarn' of a part of each head is not supported by megatron-core, only of whole heads; use "
                "another backend"
            )
    return ""


def _unsupported_router(hf: Fields, experts: Experts) -> str:
    normalized = _says(hf, experts.normalized)
    if hf["num_experts_per_tok"] == 1 and normalized:
        # transformers gives that expert the weight 1; megatron-core refuses a softmax over one.
        return (
            "norm_topk_prob=true with num_experts_per_tok=1, which leaves the router no gradient, is not supported by "
            "this backend; set norm_topk_prob to false, or use another backend"
        )
    if experts.sigmoid and not normalized and hf["num_experts_per_tok"] > 1:
        return (
            "norm_topk_prob=false of a router with sigmoids is not supported by megatron-core, where the weights of a "
            "token's experts sum to 1; use another backend"
        )
    return ""


def _rope(hf: Fields) -> Fields:
    found: Fields | None = hf.get("rope_parameters")  # in transformers 5; two fields before that
    if found and "full_attention" in found:
        found = found["full_attention"]
    return found or {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {})}


def _local_rope(hf: Fields) -> Fields:
    """Of layers with windows, if theirs is another."""
    found: Fields = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    return found


def _rotated(hf: Fields, family: Family) -> float:
    """The part of each head that positions turn."""
    if not family.partial_rope:
        return 1.0
    return float(_rope(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)))


def _concentration(rope: Fields) -> float:
    """YaRN's factor of queries and keys (Peng et al. 2023, eq. 22), and DeepSeek's variant with two scales."""

    def scale(of: float) -> float:
        return 0.1 * of * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(all_dims) if one and all_dims else scale(1.0)


def _says(hf: Fields, field: bool | str) -> bool:
    return bool(hf[field]) if isinstance(field, str) else field


@frozen(kw_only=True)
class Architecture:
    """A model in Megatron's terms."""

    transformer: Mapping[str, Any]  # arguments of TransformerConfig
    yarn: Mapping[str, Any]  # further attributes of it, which megatron-core reads and does not declare
    gpt: Mapping[str, Any]  # arguments of GPTModel
    names: Mapping[Part, tuple[str, ...]]  # of Hugging Face tensors in a layer
    vocabulary: int  # rows of the embedding, without padding
    padding: int | None  # the token whose embedding is not trained as an input
    tied: bool
    experts: int  # in a layer; 0 for a dense model
    choice_bias: bool  # whether routers have a bias in a buffer
    latent: bool  # whether attention is
    activation: str  # of the MLP: silu, gelu or, with a clamp, quick_gelu
    norms_after: bool  # attention and MLP have one after them too
    embedding_scale: float  # of embeddings as inputs
    rounds_scale: bool  # to the precision of the embeddings
    residual_scale: float  # of what attention and MLP add
    logits_scale: float  # by which logits are divided
    local_rotary_base: float | None  # of layers with windows; None if it is that of the others
    clamp: float | None  # what GPT-OSS's SwiGLU lets through at most
    alternating: bool  # see Experts

    @property
    def dense(self) -> bool:
        """Whether any layer has an MLP instead of experts."""
        return not self.experts or 0 in self.transformer["moe_layer_freq"]


def architecture(hf: Fields, *, value_head: bool) -> Architecture:
    """The architecture of a model that `unsupported_by` accepts. A critic ties no weights."""
    family = FAMILIES[hf["model_type"]]
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    experts = family.experts if experts_of(hf) else None
    tied = bool(hf["tie_word_embeddings"]) and not value_head
    return Architecture(
        transformer={
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hidden // heads,
            "ffn_hidden_size": hf["intermediate_size"],
            "layernorm_epsilon": hf["rms_norm_eps"],
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": family.all_biases,
            "add_qkv_bias": _says(hf, family.qkv_bias),
            "qk_layernorm": hf["q_lora_rank"] is not None if family.latent else _says(hf, family.qk_norm),
            "softmax_type": "learnable" if family.sinks else "vanilla",
            "softmax_scale": family.softmax_scale(hf),
            "layernorm_zero_centered_gamma": family.centered_norms,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **(_latent(hf) if family.latent else {}),
            **(_windows(hf) if family.windows else {}),
            **({"no_rope_freq": [int(not each) for each in hf["no_rope_layers"]]} if family.ropeless else {}),
            **(_choice(hf, experts) if experts else {}),
        },
        yarn={} if family.latent else _yarn(_rope(hf)),
        gpt={
            "max_sequence_length": hf["max_position_embeddings"],
            "share_embeddings_and_output_weights": tied,
            **_positions(hf, family),
        },
        names={**NAMES, **family.names},
        vocabulary=hf["vocab_size"],
        # transformers passes it to torch's embedding as padding_idx, where a negative index counts from the end.
        padding=None if hf.get("pad_token_id") is None else hf["pad_token_id"] % hf["vocab_size"],
        tied=tied,
        experts=experts_of(hf) if experts else 0,
        choice_bias=experts is not None and experts.sigmoid,
        latent=family.latent,
        activation="gelu" if family.gelu else "quick_gelu" if experts and experts.alternating else "silu",
        norms_after=family.norms_after,
        embedding_scale=family.embedding_scale(hf),
        rounds_scale=family.rounds_scale,
        residual_scale=family.residual_scale(hf),
        logits_scale=family.logits_scale(hf),
        local_rotary_base=_local_rope(hf).get("rope_theta"),
        clamp=hf.get("swiglu_limit", 7.0) if experts and experts.alternating else None,
        alternating=experts is not None and experts.alternating,
    )


def linear_layers(built: Architecture) -> Iterator[str]:
    """The linear layers of the Hugging Face model, by name, without routers, experts and the head."""
    sizes = built.transformer
    attention = [Part.QKV, Part.PROJ]
    if built.latent:
        queries = [Part.Q] if sizes["q_lora_rank"] is None else [Part.Q_DOWN, Part.Q_UP]
        attention = [*queries, Part.KV_DOWN, Part.KV_UP, Part.PROJ]
    beside = [Part.SHARED_FC1, Part.SHARED_FC2] if sizes.get("moe_shared_expert_intermediate_size") else []
    beside += [Part.SHARED_GATE] if sizes.get("moe_shared_expert_gate") else []
    for layer in range(sizes["num_layers"]):
        moe = built.experts and sizes["moe_layer_freq"][layer]
        for part in [*attention, *(beside if moe else [Part.FC1, Part.FC2])]:
            for name in built.names[part]:
                yield f"model.layers.{layer}.{name.removesuffix('.weight')}"


def _latent(hf: Fields) -> Mapping[str, Any]:
    """Arguments of MLATransformerConfig on attention."""
    rope = _rope(hf)
    found = {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rotary_base": rope["rope_theta"],
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if rope.get("rope_type") != "yarn":
        return found
    scaled = rope.get("mscale") and rope.get("mscale_all_dim")
    return found | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": rope["mscale"] if scaled else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if scaled else 0.0,
    }


def _windows(hf: Fields) -> Mapping[str, Any]:
    size, kinds = hf.get("sliding_window"), hf.get("layer_types")
    layers: Sequence[int] = [int(kind == "sliding_attention") for kind in kinds] if kinds else _every(hf)
    if not size or not hf.get("use_sliding_window", True) or not any(layers):
        return {}
    # Tokens to the left of a token, and to the right. transformers counts the token itself.
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": layers}


def _choice(hf: Fields, experts: Experts) -> Mapping[str, Any]:
    """Arguments of TransformerConfig on experts."""
    found = {
        "num_moe_experts": experts_of(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf[experts.columns],
        "moe_layer_freq": experts.layers(hf),
        "moe_router_dtype": "fp32",
    }
    if shared := experts.shared(hf):
        found |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": experts.shared_gate}
    if not experts.sigmoid:
        # transformers takes the softmax over all experts; renormalized over the chosen ones, it is their softmax.
        return {**found, "moe_router_pre_softmax": not _says(hf, experts.normalized)}
    found |= {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": hf["routed_scaling_factor"]}
    if hf["n_group"] > 1:
        found |= {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}
    return found


def _positions(hf: Fields, family: Family) -> Mapping[str, Any]:
    """Arguments of GPTModel on positions."""
    rope = _rope(hf)
    found = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
    if family.partial_rope:
        found["rotary_percent"] = _rotated(hf, family)
    match rope.get("rope_type", "default"):
        case "llama3":
            found |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        case "linear":
            found["seq_len_interpolation_factor"] = rope["factor"]
        case "yarn" if not family.latent:  # whose layers have positions of their own
            found["position_embedding_type"] = "yarn"
    return found


def _yarn(rope: Fields) -> Mapping[str, Any]:
    if rope.get("rope_type") != "yarn":
        return {}
    scales = rope.get("mscale") and rope.get("mscale_all_dim")
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": rope["mscale"] if scales else None,
        "yarn_mscale_all_dim": rope["mscale_all_dim"] if scales else None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }
