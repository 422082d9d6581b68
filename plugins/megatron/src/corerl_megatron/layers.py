"""Transformer layers in plain torch: megatron-core's, except norm and attention, which need TransformerEngine for
packed sequences and for context and sequence parallelism."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from corerl.ops.attention import packed_attention
from corerl_megatron.packed import PackedParams, SumOfGather


class TorchRMSNorm(torch.nn.Module):
    """An RMSNorm with sequence parallelism, which megatron-core's refuses; the weight's gradient is then partial."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by megatron-core

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class TorchAttention(MegatronModule):
    """softmax(q k^T * scale) v over packed sequences, which megatron-core's lacks, as well as context parallelism.

    With context parallelism, keys and values of all tokens are gathered, and each rank computes its own queries.
    """

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
            return packed_attention(query, key, value, packing, self.scale).flatten(1)
        keys, values = (SumOfGather.apply(x, self.group).index_select(0, split.restore) for x in (key, value))
        bounds = packing.bounds.tolist()
        lengths = [(stop - start) // self.group.size() for start, stop in pairwise(bounds)]
        parts = []
        for start, stop, q, at in zip(
            bounds[:-1], bounds[1:], query.split(lengths), split.local.split(lengths), strict=True
        ):
            mask = at[:, None] >= torch.arange(start, stop, device=at.device)[None]
            a, b, c = (x.transpose(0, 1)[None] for x in (q, keys[start:stop], values[start:stop]))
            part = scaled_dot_product_attention(
                a, b, c, attn_mask=mask, scale=self.scale, enable_gqa=a.shape[1] != b.shape[1]
            )
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)


def torch_layers(config: TransformerConfig, *, vp_stage: int | None) -> Any:
    """The specification of this rank's layers, dense and MoE, in plain torch."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchRMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = TorchAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    block.layer_norm = TorchRMSNorm
    return block


def engine_layers(config: TransformerConfig, *, vp_stage: int | None) -> Any:
    """The same with TransformerEngine's modules."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm", vp_stage=vp_stage)
