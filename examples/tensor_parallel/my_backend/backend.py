"""A backend whose linear layers, experts and embeddings are divided over the ranks of a tensor-parallel group, which
share samples (Shoeybi et al. 2019, "Megatron-LM"), in plain torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import embedding

from corerl.backend import Backend, StateKey, StepLosses, adamw, forward_outputs, moments, set_adam, set_adam_step
from corerl.config import RoleConfig
from corerl.errors import ModelError
from corerl.models import buffer_chunks, hf_boxes, hf_config, local_chunks, make_policy, materialize
from corerl.ops import scale_grads
from corerl.plugin import Context
from corerl.types import (
    ForwardResult,
    GradientResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    ParallelLayout,
    Step,
    StepResult,
)
from corerl.weights import Chunk

OUT = re.compile(r"\.(q|k|v|gate|up)_proj(\.\w+)?$")  # rows divided: each rank computes a part of the outputs
IN = re.compile(r"\.(o|down)_proj(\.weight)?$")  # the inner dim divided: each rank computes a part of the sum
EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")  # [E, 2I, H] and [E, H, I] of all experts, I divided
VOCABULARY = re.compile(r"(embed_tokens|lm_head)\.weight$")  # rows divided, the last ones padded
PER_HEAD = re.compile(r"\.[qk]_norm\.weight$")  # whole, but each rank's heads give a part of the gradient


@frozen
class Part:
    """What a rank holds of a parameter along `dim`: `size` entries, first those at `places` of the whole one, each
    (start, size), then padding."""

    dim: int
    size: int
    places: tuple[tuple[int, int], ...]


def part_of(name: str, shape: Sequence[int], rank: int, ranks: int) -> Part | None:
    """The part of tensor-parallel rank `rank`; None if each has the whole parameter."""
    if VOCABULARY.search(name):
        size = math.ceil(shape[0] / ranks)
        return Part(0, size, ((rank * size, max(0, min(size, shape[0] - rank * size))),))
    if found := EXPERTS.search(name):
        dim = 1 if found[1] == "gate_up" else 2
        halves = 2 if found[1] == "gate_up" else 1  # gate and up are one tensor, of which each has a part
        each = shape[dim] // halves
        size = each // ranks
        return Part(dim, halves * size, tuple((half * each + rank * size, size) for half in range(halves)))
    if OUT.search(name) or IN.search(name):
        dim = 0 if OUT.search(name) else 1
        size = shape[dim] // ranks
        return Part(dim, size, ((rank * size, size),))
    return None


class Copied(torch.autograd.Function):
    """What all ranks have and each uses in part: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class Summed(torch.autograd.Function):
    """The sum of what each rank has in part: the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def divide(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Part]:
    """Give the modules of a model on meta this rank's parts, and what joins these in a pass; returns the parts."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole = dict(model.named_parameters())
    parts = {name: part for name, at in whole.items() if (part := part_of(name, at.shape, rank, ranks))}
    smaller = {}
    for name, part in parts.items():
        shape = list(whole[name].shape)
        shape[part.dim] = part.size
        smaller[id(whole[name])] = nn.Parameter(whole[name].new_empty(shape))
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) in smaller:  # tied weights are one parameter in two modules, and stay one
                setattr(module, name, smaller[id(param)])
        join(f".{path}", module, group)
    return parts


def join(path: str, module: nn.Module, group: dist.ProcessGroup) -> None:
    if path.endswith(".experts"):
        # Each rank computes a part of every expert. Weights of routers reach the experts' outputs, which are parts too.
        module.register_forward_pre_hook(
            lambda _, given: (Copied.apply(given[0], group), given[1], Copied.apply(given[2], group))
        )
        module.register_forward_hook(lambda _, given, part: Summed.apply(part, group))
    elif OUT.search(path):
        module.register_forward_pre_hook(lambda _, given: (Copied.apply(given[0], group), *given[1:]))
    elif IN.search(path):
        if getattr(module, "bias", None) is not None:
            raise ModelError(f"{path} has a bias, which every rank would add; use another model")
        module.register_forward_hook(lambda _, given, part: Summed.apply(part, group))
    elif isinstance(module, nn.Embedding):
        module.forward = partial(embedded, module, group)  # type: ignore[method-assign]
    # The policy reads the head's matrix, and joins what its ranks have: make_policy was given the group.


def embedded(module: nn.Embedding, group: dist.ProcessGroup, tokens: Tensor) -> Tensor:
    """Each token's row, from the rank that has it."""
    first = dist.get_rank(group) * len(module.weight)
    own = (tokens >= first) & (tokens < first + len(module.weight))
    padding = -1 if module.padding_idx is None else module.padding_idx - first
    untrained = padding if 0 <= padding < len(module.weight) else None
    rows = embedding((tokens - first).where(own, 0), module.weight, padding_idx=untrained)
    whole: Tensor = Summed.apply(rows * own[..., None], group)
    return whole


class TensorParallelBackend(Backend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        ranks = config.options.tensor_parallel
        mesh = init_device_mesh(
            self.device.type, (context.world_size // ranks, ranks), mesh_dim_names=("data", "tensor")
        )
        self.data, self.tensor = mesh.get_group("data"), mesh.get_group("tensor")
        self.data_rank, self.tensor_rank = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
        dtype = getattr(torch, config.train.precision) if config.frozen else torch.float32
        self.policy = make_policy(
            hf_config(config.model),
            dtype=dtype,
            layout=config.train.layout,
            value_head=config.value_head,
            vocabulary=config.model.vocabulary,
            group=self.tensor,
        )
        model = self.policy.model
        self.boxes = hf_boxes(model)  # of the whole model: before its shapes change
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        self.parts = divide(model, self.tensor)
        self.params = {  # zeros, for rows of padding are in no file and must stay 0
            name: nn.Parameter(torch.zeros(param.shape, dtype=dtype, device=self.device))
            for name, param in model.named_parameters()
        }
        materialize(model, self.params)
        self.policy.to(self.device)
        if not config.frozen:
            self.optimizer = adamw(self.params, shapes, config.train.optimizer, fused=self.device.type == "cuda")
        return ParallelLayout(
            rank=context.rank,
            world_size=context.world_size,
            dp_rank=self.data_rank,
            dp_size=context.world_size // ranks,
            outputs=self.tensor_rank == 0,
            rectangular=self.policy.rectangular,
        )

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        self.policy.train()
        losses = StepLosses(self.outputs, batch, loss, outputs, device=self.device, routers=self.policy.routers)
        for value in losses:
            value.backward()
        return losses.result()

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        self.sum_gradients()
        scale_grads(self.params.values(), scale)
        norm = self.norm()
        applied = math.isfinite(norm)
        if applied:
            settings = self.optimizer_at(step)
            limit = settings.clip_norm or math.inf
            torch.nn.utils.clip_grads_with_norm_(self.params.values(), limit, torch.tensor(norm, device=self.device))
            set_adam(self.optimizer, settings)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(applied=applied, grad_norm=norm)

    def sum_gradients(self) -> None:
        """Over ranks with other samples; and where ranks with the same samples each have a part, over these too."""
        for name, param in self.params.items():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad, group=self.data)
            if PER_HEAD.search(name):
                dist.all_reduce(param.grad, group=self.tensor)

    def norm(self) -> float:
        """Of the whole model's gradients: divided parameters once for each part, the others once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)  # of divided ones, of whole ones
        for name, param in self.params.items():
            squares[int(name not in self.parts)] += torch.linalg.vector_norm(param.grad, dtype=torch.float64).square()
        divided = squares[:1].clone()
        dist.all_reduce(divided, group=self.tensor)
        return math.sqrt(float(divided[0] + squares[1]))

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        self.policy.eval()
        return forward_outputs(self.outputs, batch, outputs, device=self.device, routers=self.policy.routers)

    def outputs(self, *inputs: Any) -> dict[Output, Tensor]:
        half = self.config.train.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            found: dict[Output, Tensor] = self.policy(*inputs)
        return found

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        chunks: list[Chunk] = []
        for name, param in self.params.items():
            if key in (StateKey.PARAM, StateKey.MASTER):
                values = param.detach()
            else:
                values = moments(self.optimizer, param, self.adam_step)[key.value]
            boxes, at, part = self.boxes[name], 0, self.parts.get(name)
            if part is None:  # on every rank: the first one's counts
                start, replica = (0,) * param.dim(), self.context.rank > 0
                chunks += local_chunks(boxes, start, tuple(param.shape), values, replica=replica)
                continue
            for start, size in part.places:
                view = values.narrow(part.dim, at, size)
                offsets = tuple(start if dim == part.dim else 0 for dim in range(param.dim()))
                chunks += local_chunks(boxes, offsets, tuple(view.shape), view, replica=self.data_rank > 0)
                at += size
        return chunks

    def buffers(self) -> Sequence[Chunk]:
        return buffer_chunks(self.policy.model, self.boxes, replica=self.context.rank > 0)

    def tensors(self, kind: MemoryKind) -> Iterable[Tensor]:
        match kind:
            case MemoryKind.PARAM:
                return list(self.params.values())
            case MemoryKind.OPTIMIZER:
                return [value for state in self.optimizer.state.values() for value in state.values()]
            case _:
                return []

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        if adam_step is not None:
            set_adam_step(self.optimizer, adam_step)
