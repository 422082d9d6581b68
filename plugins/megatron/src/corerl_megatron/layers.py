"""Transformer layers in plain torch: megatron-core's, except norm and attention, which need TransformerEngine for
packed sequences and for context and sequence parallelism. What megatron-core's routers and experts lack is added."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention

from corerl.ops import packed_attention
from corerl_megatron.packed import PackedParams, SumOfGather

LATENT_EPS = 1e-6  # of the norms of compressed queries, keys and values: in transformers' code, not in the config


class TorchRMSNorm(torch.nn.Module):
    """An RMSNorm with sequence parallelism, which megatron-core's refuses; the weight's gradient is then partial."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma: bool = config.layernorm_zero_centered_gamma
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by megatron-core

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered_gamma:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        # In float32, as in transformers: in bfloat16, adding 1 rounds away most digits of a small weight.
        return rms_norm(x.float(), self.weight.shape, self.weight.float() + 1, self.eps).type_as(x)


class TorchAttention(MegatronModule):
    """softmax(q k^T * scale) v over packed sequences, which megatron-core's lacks, as well as context parallelism.

    With context parallelism, keys and values of all tokens are gathered, and each rank computes its own queries. Sinks
    and windows are as in `packed_attention`.
    """

    softmax_offset: torch.nn.Parameter | None  # [heads of this rank] sinks, under megatron-core's name

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.group = getattr(pg_collection, "cp", None) or get_context_parallel_group()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None  # tokens, with the token itself
        sinks = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        self.register_parameter("softmax_offset", sinks)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, groups, d] of this rank's t tokens; returns [t, heads * d]."""
        assert packed_seq_params is not None
        packing, split = packed_seq_params.packing, packed_seq_params.split
        if split is None:
            out = packed_attention(
                query, key, value, packing, self.scale, window=self.window, sinks=self.softmax_offset
            )
            return out.flatten(1)
        keys, values = (SumOfGather.apply(x, self.group).index_select(0, split.restore) for x in (key, value))
        bounds = packing.bounds.tolist()
        lengths = [(stop - start) // self.group.size() for start, stop in pairwise(bounds)]
        parts = []
        for start, stop, q, at in zip(
            bounds[:-1], bounds[1:], query.split(lengths), split.local.split(lengths), strict=True
        ):
            back = at[:, None] - torch.arange(start, stop, device=at.device)[None]
            seen = (back >= 0) & (back < (self.window or packing.tokens))
            parts.append(self._attend(q, keys[start:stop], values[start:stop], seen))
        return torch.cat(parts).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """For q [t, heads, d] and k, v [T, groups, d] of one sequence, where `seen` [t, T] says which keys each query
        sees; returns [t, heads, d]."""
        scale = q.shape[2] ** -0.5 if self.scale is None else self.scale
        if self.softmax_offset is not None:
            # A further key with value 0, in a further dim of all heads, in which queries have the score of their head.
            scores = (self.softmax_offset / scale).to(q.dtype)[None, :, None]
            q, k = torch.cat([q, scores.expand(len(q), -1, 1)], dim=2), pad(k, (0, 1))
            unit = torch.cat([k.new_zeros(1, *k.shape[1:-1], k.shape[2] - 1), k.new_ones(1, k.shape[1], 1)], dim=2)
            k, v, seen = torch.cat([unit, k]), pad(v, (0, 0, 0, 0, 1, 0)), pad(seen, (1, 0), value=True)
        a, b, c = (x.transpose(0, 1)[None] for x in (q, k, v))
        part = scaled_dot_product_attention(a, b, c, attn_mask=seen, scale=scale, enable_gqa=a.shape[1] != b.shape[1])
        return part[0].transpose(0, 1)


def torch_layers(config: TransformerConfig, *, vp_stage: int | None) -> Any:
    """The specification of this rank's layers, dense and MoE, in plain torch."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchRMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = TorchAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = attention.kv_layernorm = TorchRMSNorm
    block.layer_norm = TorchRMSNorm
    return block


def engine_layers(config: TransformerConfig, *, vp_stage: int | None, norms_apart: bool) -> Any:
    """The same with TransformerEngine's modules, except attention that they do not offer for packed sequences: with
    sinks, and with windows over context-parallel ranks. Norms are fused into the next matrix unless `norms_apart`."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm", vp_stage=vp_stage)
    if config.softmax_type != "vanilla" or (config.window_size and config.context_parallel_size > 1):
        for layer in {id(spec): spec for spec in block.layer_specs}.values():
            layer.submodules.self_attention.submodules.core_attention = TorchAttention
    if norms_apart:
        for layer in {id(spec): spec for spec in block.layer_specs}.values():
            _take_norms_apart(layer.submodules, config)
    return block


def _take_norms_apart(layer: Any, config: TransformerConfig) -> None:
    """Let the norms of a specification with TransformerEngine's modules be modules of their own."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    norm, matrix = TESpecProvider().layer_norm(), TESpecProvider().column_parallel_linear()
    attention = layer.self_attention.submodules
    if not config.multi_latent_attention:
        attention.linear_qkv, layer.input_layernorm = matrix, norm
    elif config.qk_layernorm:
        attention.linear_q_up_proj = attention.linear_kv_up_proj = matrix
        attention.q_layernorm = attention.kv_layernorm = norm
    if layer.pre_mlp_layernorm is IdentityOp:  # an MLP; the norm before experts is not fused
        layer.mlp.submodules.linear_fc1, layer.pre_mlp_layernorm = matrix, norm


def change_what_is_added(layer: TransformerLayer, *, norms: bool, scale: float) -> None:
    """Let what attention and MLP add to the layer's input go through norms, and be scaled."""
    config = layer.config
    for part, name in ((layer.self_attention, "post_attention_layernorm"), (layer.mlp, "post_mlp_layernorm")):
        norm = TorchRMSNorm(config, config.hidden_size, config.layernorm_epsilon) if norms else None
        if norm is not None:
            layer.add_module(name, norm)
        part.register_forward_hook(partial(_changed, norm, scale))


def _changed(norm: nn.Module | None, scale: float, module: nn.Module, args: Any, result: tuple[Tensor, None]) -> Any:
    out, bias = result
    assert bias is None  # no such family has any
    out = out if norm is None else norm(out)
    return out if scale == 1 else out * scale, None


def use_local_rope(attention: SelfAttention, rotary: RotaryEmbedding) -> None:
    """Give a layer with a window positions of its own."""

    def turned(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        longest = kwargs["packed_seq_params"].max_seqlen_q
        return args, {**kwargs, "rotary_pos_emb": rotary(longest, packed_seq=True)}

    attention.register_forward_pre_hook(turned, with_kwargs=True)


class Duplicated(MegatronModule):
    """x W^T whole on every tensor-parallel rank, as TransformerEngine's. megatron-core's in plain torch splits the rows
    of W, and then gives a rank only its own heads' part of the gradient of keys that all heads share."""

    def __init__(self, rows: int, columns: int, config: TransformerConfig) -> None:
        super().__init__(config=config)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by megatron-core

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return linear(x, self.weight), None


def finish_latent(attention: MLASelfAttention, *, engine: bool) -> None:
    """Put into latent attention what megatron-core's specification of layers cannot say."""
    config = attention.config
    if not engine:
        hidden, keys = config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        attention.linear_kv_down_proj = Duplicated(keys, hidden, config)
        if config.q_lora_rank is not None:
            attention.linear_q_down_proj = Duplicated(config.q_lora_rank, hidden, config)
    if config.q_lora_rank is None:  # where megatron-core 0.19 has both norms or none
        attention.kv_layernorm = TorchRMSNorm(config, config.kv_lora_rank)
    for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):  # or fused into the matrix
        module: Any = getattr(attention, name, None)
        if hasattr(module, "eps"):
            module.eps = LATENT_EPS


def share_rotary(attentions: Sequence[MLASelfAttention]) -> None:
    """Let latent attention turn by one set of tables in all layers, where megatron-core makes one for each."""
    for attention in attentions[1:]:
        attention.rotary_pos_emb = attentions[0].rotary_pos_emb


def add_choice_bias(router: TopKRouter) -> None:
    """Give a router a bias [experts] float32, in a buffer, by which it chooses experts without weighing them.

    megatron-core makes it itself if its config says so, but then changes it in each step by how many tokens the experts
    had. Here only a checkpoint does.
    """
    del router.expert_bias  # None
    router.register_buffer("expert_bias", torch.zeros(router.num_experts, dtype=torch.float32, device="cuda"))


def make_alternating(experts: nn.Module) -> None:
    """Let the first matrix of each expert have the columns of gate and up in turns, as GPT-OSS's tensors do."""

    def parted(module: nn.Module, args: Any, result: tuple[Tensor, Any]) -> tuple[Any, ...]:
        return tuple(None if each is None else each.unflatten(-1, (-1, 2)).mT.flatten(-2) for each in result)

    def owned(module: nn.Module, args: Any, result: tuple[Tensor, Any]) -> tuple[Any, ...]:
        # megatron-core's MLP adds the bias in place, which autograd forbids where one rank has returned its input.
        return result[0].clone(), result[1]

    for name, module in experts.named_modules():
        match name.split("."):
            case [*_, "linear_fc1"]:
                module.register_forward_hook(parted)
            case ["local_experts", _, "linear_fc2"]:
                module.register_forward_hook(owned)
