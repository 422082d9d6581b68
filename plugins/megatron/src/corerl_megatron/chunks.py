"""Megatron's part of the chunk map: the boxes of HF tensors that make up each parameter of this rank, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from attrs import frozen
from megatron.core.transformer import TransformerConfig
from torch import nn

from corerl.errors import ModelError
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.weights.chunks import Box, Chunk, flat_range_views, intersect, within
from corerl_megatron.families import Architecture
from corerl_megatron.model import EMBEDDING, HEAD, PackedModel
from corerl_megatron.parallel import Groups


class Cut(Enum):
    """How tensor parallelism splits a parameter, and how its rows are laid out."""

    WHOLE = "whole"  # equal on all tensor-parallel ranks
    ROWS = "rows"  # of the vocabulary, padded at the end
    COLUMNS = "columns"
    GATED = "gated"  # rows of the gate, then as many rows of the up projection
    QKV = "qkv"  # for each group of key-value heads: its query heads, its key head, its value head


@frozen
class Rule:
    pattern: str  # matches the name after decoder.layers.N., or the whole name
    cut: Cut
    hf: tuple[str, ...]  # names after model.layers.N., with {expert}; or whole names


# Alternative names are TransformerEngine's, which fuses a norm into the next matrix and all experts into one module.
LAYER = (
    Rule(
        r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)",
        Cut.WHOLE,
        ("input_layernorm.weight",),
    ),
    Rule(
        r"self_attention\.linear_qkv\.weight",
        Cut.QKV,
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    Rule(
        r"self_attention\.linear_qkv\.bias",
        Cut.QKV,
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    Rule(r"self_attention\.linear_proj\.weight", Cut.COLUMNS, ("self_attn.o_proj.weight",)),
    Rule(r"self_attention\.q_layernorm\.weight", Cut.WHOLE, ("self_attn.q_norm.weight",)),
    Rule(r"self_attention\.k_layernorm\.weight", Cut.WHOLE, ("self_attn.k_norm.weight",)),
    Rule(
        r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)",
        Cut.WHOLE,
        ("post_attention_layernorm.weight",),
    ),
    Rule(r"mlp\.linear_fc1\.weight", Cut.GATED, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Rule(r"mlp\.linear_fc2\.weight", Cut.COLUMNS, ("mlp.down_proj.weight",)),
    Rule(r"mlp\.router\.weight", Cut.WHOLE, ("mlp.gate.weight",)),
    Rule(
        r"mlp\.experts\.(local_experts\.(?P<expert>\d+)\.linear_fc1\.weight|linear_fc1\.weight(?P<grouped>\d+))",
        Cut.GATED,
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    ),
    Rule(
        r"mlp\.experts\.(local_experts\.(?P<expert>\d+)\.linear_fc2\.weight|linear_fc2\.weight(?P<grouped>\d+))",
        Cut.COLUMNS,
        ("mlp.experts.{expert}.down_proj.weight",),
    ),
)
TOP = (
    Rule(re.escape(EMBEDDING), Cut.ROWS, ("model.embed_tokens.weight",)),
    Rule(r"decoder\.final_layernorm\.weight", Cut.WHOLE, ("model.norm.weight",)),
    Rule(re.escape(HEAD), Cut.ROWS, ("lm_head.weight",)),
    Rule(re.escape(VALUE_HEAD_WEIGHT), Cut.WHOLE, (VALUE_HEAD_WEIGHT,)),
)
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@frozen
class Piece:
    """One box of an HF tensor: where it begins in the tensor and in the parameter; both have the same axes."""

    name: str
    shape: tuple[int, ...]  # of the HF tensor
    offsets: tuple[int, ...]  # in the HF tensor
    start: tuple[int, ...]  # in the parameter
    sizes: tuple[int, ...]

    def chunk(self, box: Box, view: torch.Tensor, *, replica: bool) -> Chunk | None:
        """The intersection with a `box` of the parameter, as a view of `view`, which holds that box."""
        common = intersect(box, (self.start, self.sizes))
        if common is None:
            return None
        offsets = tuple(at + o - s for at, o, s in zip(common[0], self.offsets, self.start, strict=True))
        return Chunk(self.name, self.shape, offsets, common[1], view[within(common, box)], replica)


@frozen(kw_only=True, eq=False)
class Held:
    """One parameter of this rank."""

    param: nn.Parameter
    pieces: Sequence[Piece]
    split: int | None  # the dim that tensor parallelism splits; None if each rank has the whole
    later_copy: bool  # a rank of another copy of the model holds it too, and sends it
    duplicate: bool  # a rank of the same copy does: it is whole on each, or the last stage's copy of the embedding

    def chunks(self, values: torch.Tensor, start: int | None = None) -> Iterator[Chunk]:
        """Chunks of `values`: the whole parameter's weights or moments; or with `start`, a flat range of them from that
        element on, which no other copy of the model has."""
        replica = self.duplicate or (start is None and self.later_copy)
        for box, view in flat_range_views(tuple(self.param.shape), start or 0, values.view(-1)):
            for piece in self.pieces:
                chunk = piece.chunk(box, view, replica=replica)
                if chunk is not None:
                    yield chunk

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zero the rows at the end that are in no HF tensor."""
        rows = max((piece.start[0] + piece.sizes[0] for piece in self.pieces), default=0)
        self.param[rows:].zero_()


def held_parameters(modules: Sequence[PackedModel], architecture: Architecture, groups: Groups) -> list[Held]:
    """Every parameter of this rank with the HF tensors in it. Raises ModelError for one that is not in the table."""
    return [
        _held(module, name, param, architecture, groups)
        for module in modules
        for name, param in module.named_parameters()
    ]


def _held(module: PackedModel, name: str, param: nn.Parameter, architecture: Architecture, groups: Groups) -> Held:
    rule, names, expert = _rule(module, name, groups)
    copy_of_embedding = name == HEAD and architecture.tied  # on the last stage; the first holds the embedding
    if copy_of_embedding:
        names = TOP[0].hf
    tensor = groups.expert_tensor if expert else groups.tensor
    whole = rule.cut is Cut.WHOLE
    return Held(
        param=param,
        pieces=list(
            _pieces(rule.cut, names, tuple(param.shape), tensor.rank(), tensor.size(), module.config, architecture)
        ),
        split=None if whole else int(rule.cut is Cut.COLUMNS),
        later_copy=not (groups.first_expert_copy if expert else groups.first_copy),
        duplicate=copy_of_embedding or (whole and tensor.rank() > 0),
    )


def _rule(module: PackedModel, name: str, groups: Groups) -> tuple[Rule, tuple[str, ...], bool]:
    """The rule for a parameter name, the HF tensors' names, and whether the parameter is an expert's."""
    in_layer = IN_LAYER.fullmatch(name)
    for rule in LAYER if in_layer else TOP:
        found = re.fullmatch(rule.pattern, in_layer[2] if in_layer else name)
        if found is None:
            continue
        if in_layer is None:
            return rule, rule.hf, False
        layer = module.decoder.layers[int(in_layer[1])].layer_number - 1  # index in the whole model
        parts = found.groupdict()
        local = parts.get("expert") or parts.get("grouped")
        first = module.config.num_moe_experts // groups.expert_ranks * groups.expert_rank if local else 0
        expert = "" if local is None else str(first + int(local))
        return rule, tuple(f"model.layers.{layer}.{hf.format(expert=expert)}" for hf in rule.hf), local is not None
    raise ModelError(f"this backend knows no Hugging Face name for megatron-core's parameter {name!r}")


def _pieces(
    cut: Cut,
    names: Sequence[str],
    shape: tuple[int, ...],
    rank: int,
    ranks: int,
    config: TransformerConfig,
    architecture: Architecture,
) -> Iterator[Piece]:
    zeros, rest = (0,) * (len(shape) - 1), shape[1:]
    match cut:
        case Cut.WHOLE:
            yield Piece(names[0], shape, (0, *zeros), (0, *zeros), shape)
        case Cut.ROWS:
            first = rank * shape[0]
            real = min(shape[0], architecture.vocabulary - first)
            if real > 0:
                yield Piece(names[0], (architecture.vocabulary, *rest), (first, *zeros), (0, *zeros), (real, *rest))
        case Cut.COLUMNS:
            yield Piece(names[0], (shape[0], shape[1] * ranks), (0, rank * shape[1]), (0, 0), shape)
        case Cut.GATED:
            rows = shape[0] // 2
            for index, name in enumerate(names):
                yield Piece(name, (rows * ranks, *rest), (rank * rows, *zeros), (index * rows, *zeros), (rows, *rest))
        case Cut.QKV:
            width, groups = config.kv_channels, config.num_query_groups // ranks
            queries = config.num_attention_heads // config.num_query_groups
            at = 0
            for group in range(rank * groups, (rank + 1) * groups):
                for name, heads in zip(names, (queries, 1, 1), strict=True):
                    rows = heads * width
                    whole = (rows * config.num_query_groups, *rest)
                    yield Piece(name, whole, (group * rows, *zeros), (at, *zeros), (rows, *rest))
                    at += rows
