"""Megatron's part of the chunk map: the boxes of HF tensors that make up each parameter of this rank, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import accumulate

import torch
from attrs import frozen
from megatron.core.transformer import TransformerConfig

from corerl.errors import ModelError
from corerl.models import VALUE_HEAD_WEIGHT, stored_buffers
from corerl.weights import Box, Chunk, flat_range_views, intersect, within
from corerl_megatron.families import Architecture, Part
from corerl_megatron.model import EMBEDDING, HEAD, PackedModel
from corerl_megatron.parallel import Groups


class Cut(Enum):
    """How tensor parallelism splits a parameter, and how its rows are laid out."""

    WHOLE = "whole"  # equal on all tensor-parallel ranks
    VOCABULARY = "vocabulary"  # rows, padded at the end
    ROWS = "rows"
    COLUMNS = "columns"
    GATED = "gated"  # rows of the gate, then as many rows of the up projection
    QKV = "qkv"  # for each group of key-value heads: its query heads, its key head, its value head


@frozen
class Rule:
    pattern: str  # matches the name after decoder.layers.N., or the whole name
    cut: Cut
    hf: Part | str  # what it is in a layer, or a whole name


# An expert is a module, or in TransformerEngine's modules a number after the name.
FC1, FC2 = (
    rf"mlp\.experts\.(local_experts\.(?P<expert>\d+)\.{name}\.{{0}}|{name}\.{{0}}(?P<grouped>\d+))"
    for name in ("linear_fc1", "linear_fc2")
)
# Alternative names are TransformerEngine's, which fuses a norm into the next matrix.
LAYER = (
    Rule(r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)", Cut.WHOLE, Part.INPUT_NORM),
    Rule(r"self_attention\.linear_qkv\.weight", Cut.QKV, Part.QKV),
    Rule(r"self_attention\.linear_qkv\.bias", Cut.QKV, Part.QKV_BIAS),
    Rule(r"self_attention\.linear_q_proj\.weight", Cut.ROWS, Part.Q),
    Rule(r"self_attention\.linear_q_down_proj\.weight", Cut.WHOLE, Part.Q_DOWN),
    Rule(r"self_attention\.linear_q_up_proj\.weight", Cut.ROWS, Part.Q_UP),
    Rule(r"self_attention\.linear_kv_down_proj\.weight", Cut.WHOLE, Part.KV_DOWN),
    Rule(r"self_attention\.(kv_layernorm\.weight|linear_kv_up_proj\.layer_norm_weight)", Cut.WHOLE, Part.KV_NORM),
    Rule(r"self_attention\.linear_kv_up_proj\.weight", Cut.ROWS, Part.KV_UP),
    Rule(r"self_attention\.core_attention\.softmax_offset", Cut.ROWS, Part.SINKS),
    Rule(r"self_attention\.linear_proj\.weight", Cut.COLUMNS, Part.PROJ),
    Rule(r"self_attention\.linear_proj\.bias", Cut.WHOLE, Part.PROJ_BIAS),
    Rule(r"self_attention\.(q_layernorm\.weight|linear_q_up_proj\.layer_norm_weight)", Cut.WHOLE, Part.Q_NORM),
    Rule(r"self_attention\.k_layernorm\.weight", Cut.WHOLE, Part.K_NORM),
    Rule(r"post_attention_layernorm\.weight", Cut.WHOLE, Part.PROJ_NORM),
    Rule(r"post_mlp_layernorm\.weight", Cut.WHOLE, Part.FC2_NORM),
    Rule(r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)", Cut.WHOLE, Part.MLP_NORM),
    Rule(r"mlp\.linear_fc1\.weight", Cut.GATED, Part.FC1),
    Rule(r"mlp\.linear_fc2\.weight", Cut.COLUMNS, Part.FC2),
    Rule(r"mlp\.router\.weight", Cut.WHOLE, Part.ROUTER),
    Rule(r"mlp\.router\.bias", Cut.WHOLE, Part.ROUTER_BIAS),
    Rule(r"mlp\.router\.expert_bias", Cut.WHOLE, Part.CHOICE_BIAS),
    Rule(FC1.format("weight"), Cut.GATED, Part.EXPERT_FC1),
    Rule(FC1.format("bias"), Cut.GATED, Part.EXPERT_FC1_BIAS),
    Rule(FC2.format("weight"), Cut.COLUMNS, Part.EXPERT_FC2),
    Rule(FC2.format("bias"), Cut.WHOLE, Part.EXPERT_FC2_BIAS),
    Rule(r"mlp\.shared_experts\.linear_fc1\.weight", Cut.GATED, Part.SHARED_FC1),
    Rule(r"mlp\.shared_experts\.linear_fc2\.weight", Cut.COLUMNS, Part.SHARED_FC2),
    Rule(r"mlp\.shared_experts\.gate_weight", Cut.WHOLE, Part.SHARED_GATE),
)
TOP = (
    Rule(re.escape(EMBEDDING), Cut.VOCABULARY, "model.embed_tokens.weight"),
    Rule(r"decoder\.final_layernorm\.weight", Cut.WHOLE, "model.norm.weight"),
    Rule(re.escape(HEAD), Cut.VOCABULARY, "lm_head.weight"),
    Rule(re.escape(VALUE_HEAD_WEIGHT), Cut.WHOLE, VALUE_HEAD_WEIGHT),
)
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@frozen
class Piece:
    """One box of an HF tensor, and where it begins in the tensor and in the parameter."""

    name: str
    shape: tuple[int, ...]  # of the HF tensor
    offsets: tuple[int, ...]  # in the HF tensor
    start: tuple[int, ...]  # in the parameter
    sizes: tuple[int, ...]  # in the parameter
    axes: tuple[int | None, ...]  # the parameter's dim for each HF dim; None where the box has size 1

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], at: int, start: int, sizes: tuple[int, ...]) -> Piece:
        """Rows `at` and later of an HF tensor with the parameter's dims, at `start` in the parameter."""
        zeros = (0,) * (len(sizes) - 1)
        return cls(name, shape, (at, *zeros), (start, *zeros), sizes, tuple(range(len(sizes))))

    def stacked(self, expert: int, experts: int) -> Piece:
        """The same in an HF tensor that has all experts, each transposed."""
        return Piece(
            self.name,
            (experts, *reversed(self.shape)),
            (expert, *reversed(self.offsets)),
            self.start,
            self.sizes,
            (None, *reversed([*self.axes])),
        )

    def chunk(self, box: Box, view: torch.Tensor, *, replica: bool) -> Chunk | None:
        """The intersection with a `box` of the parameter, as a view of `view`, which holds that box."""
        common = intersect(box, (self.start, self.sizes))
        if common is None:
            return None
        offsets = tuple(
            at if axis is None else at + common[0][axis] - self.start[axis]
            for at, axis in zip(self.offsets, self.axes, strict=True)
        )
        sizes = tuple(1 if axis is None else common[1][axis] for axis in self.axes)
        oriented = view[within(common, box)].permute([axis for axis in self.axes if axis is not None])
        return Chunk(self.name, self.shape, offsets, sizes, oriented.view(sizes), replica)


@frozen(kw_only=True, eq=False)
class Held:
    """One parameter, or stored buffer, of this rank."""

    param: torch.Tensor
    pieces: Sequence[Piece]
    expert: bool  # whether it is of an expert
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


def held_buffers(modules: Sequence[PackedModel], architecture: Architecture, groups: Groups) -> list[Held]:
    """The same for stored buffers."""
    return [
        _held(module, name, buffer, architecture, groups)
        for module in modules
        for name, buffer in stored_buffers(module).items()
    ]


def _held(module: PackedModel, name: str, param: torch.Tensor, architecture: Architecture, groups: Groups) -> Held:
    rule, names, expert = _rule(module, name, architecture, groups)
    copy_of_embedding = name == HEAD and architecture.tied  # on the last stage; the first holds the embedding
    if copy_of_embedding:
        names = (str(TOP[0].hf),)
    tensor = groups.tensor if expert is None else groups.expert_tensor
    pieces = list(
        _pieces(rule.cut, names, tuple(param.shape), tensor.rank(), tensor.size(), module.config, architecture)
    )
    if expert is not None and architecture.alternating:
        pieces = [piece.stacked(expert, architecture.experts) for piece in pieces]
    whole = rule.cut is Cut.WHOLE
    return Held(
        param=param,
        pieces=pieces,
        expert=expert is not None,
        split=None if whole else int(rule.cut is Cut.COLUMNS),
        later_copy=not (groups.first_copy if expert is None else groups.first_expert_copy),
        duplicate=copy_of_embedding or (whole and tensor.rank() > 0),
    )


def _rule(
    module: PackedModel, name: str, architecture: Architecture, groups: Groups
) -> tuple[Rule, tuple[str, ...], int | None]:
    """The rule for a parameter name, the HF tensors' names, and the parameter's expert, if it is of one."""
    in_layer = IN_LAYER.fullmatch(name)
    for rule in LAYER if in_layer else TOP:
        found = re.fullmatch(rule.pattern, in_layer[2] if in_layer else name)
        if found is None:
            continue
        if in_layer is None:
            return rule, (str(rule.hf),), None
        hf = architecture.names.get(rule.hf) if isinstance(rule.hf, Part) else None
        if hf is None:
            break
        layer = module.decoder.layers[int(in_layer[1])].layer_number - 1  # index in the whole model
        parts = found.groupdict()
        local = parts.get("expert") or parts.get("grouped")
        expert = None
        if local is not None:
            expert = architecture.experts // groups.expert_ranks * groups.expert_rank + int(local)
        return rule, tuple(f"model.layers.{layer}.{each.format(expert=expert)}" for each in hf), expert
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
    rest = shape[1:]
    if cut is Cut.GATED and architecture.alternating:
        cut = Cut.ROWS
    match cut:
        case Cut.WHOLE:
            yield Piece.of(names[0], shape, 0, 0, shape)
        case Cut.VOCABULARY:
            yield from vocabulary_pieces(names[0], shape, architecture.vocabulary, rank)
        case Cut.ROWS:
            yield Piece.of(names[0], (shape[0] * ranks, *rest), rank * shape[0], 0, shape)
        case Cut.COLUMNS:
            columns = shape[1]
            yield Piece(names[0], (shape[0], columns * ranks), (0, rank * columns), (0, 0), shape, (0, 1))
        case Cut.GATED:
            rows = shape[0] // 2
            tensors = _below(names, (rows * ranks,) * 2)
            for index, (name, total, at) in enumerate(tensors):
                yield Piece.of(name, (total, *rest), at + rank * rows, index * rows, (rows, *rest))
        case Cut.QKV:
            width, groups = config.kv_channels, config.num_query_groups // ranks
            parts = [heads * width for heads in (config.num_attention_heads // config.num_query_groups, 1, 1)]
            tensors = _below(names, [rows * config.num_query_groups for rows in parts])
            start = 0
            for group in range(rank * groups, (rank + 1) * groups):
                for rows, (name, total, at) in zip(parts, tensors, strict=True):
                    yield Piece.of(name, (total, *rest), at + group * rows, start, (rows, *rest))
                    start += rows


def vocabulary_pieces(name: str, shape: tuple[int, ...], vocabulary: int, rank: int) -> Iterator[Piece]:
    """What one rank has of a tensor with so many rows, padded at the end; nothing if it has padding only."""
    first, rest = rank * shape[0], shape[1:]
    real = min(shape[0], vocabulary - first)
    if real > 0:
        yield Piece.of(name, (vocabulary, *rest), first, 0, (real, *rest))


def _below(names: Sequence[str], rows: Sequence[int]) -> list[tuple[str, int, int]]:
    """For each part with so many `rows`: its tensor, the rows of that, and the part's first among them. Each part is a
    tensor, or one tensor has them all."""
    if len(names) > 1:
        return [(name, count, 0) for name, count in zip(names, rows, strict=True)]
    return [(names[0], sum(rows), at) for at in (0, *accumulate(rows[:-1]))]
