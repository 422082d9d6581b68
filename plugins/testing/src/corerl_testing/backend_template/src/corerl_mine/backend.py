"""The backend, in plain torch: every rank holds the whole model and trains on its share of the samples, and gradients
are summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from corerl.backend import (
    Backend,
    StateKey,
    StepLosses,
    adamw,
    forward_outputs,
    moments,
    set_adam,
    set_adam_step,
)
from corerl.config import RoleConfig
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


class MineBackend(Backend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        dtype = getattr(torch, config.train.precision) if config.frozen else torch.float32
        self.policy = make_policy(
            hf_config(config.model),
            dtype=dtype,
            layout=config.train.layout,
            value_head=config.value_head,
            vocabulary=config.model.vocabulary,
        )
        model = self.policy.model
        self.boxes = hf_boxes(model)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        self.params = {
            name: torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device))
            for name, shape in shapes.items()
        }
        materialize(model, self.params)
        self.policy.to(self.device)  # moves buffers; parameters are there already
        if not config.frozen:  # else it only passes samples
            self.optimizer = adamw(self.params, shapes, config.train.optimizer, fused=self.device.type == "cuda")
        return ParallelLayout.data_parallel(
            rank=context.rank, world_size=context.world_size, rectangular=self.policy.rectangular
        )

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        self.policy.train()
        losses = StepLosses(
            self.outputs,
            batch,
            loss,
            outputs,
            device=self.device,
            routers=self.policy.routers,
            aux_loss_coef=self.config.train.aux_loss_coef,
        )
        for value in losses:
            value.backward()  # accumulates gradients over micro-batches, and over calls
        return losses.result()

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        self.sum_gradients()
        scale_grads(self.params.values(), scale)
        settings = self.optimizer_at(step)
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), settings.clip_norm or math.inf).item()
        applied = math.isfinite(norm)  # equal on all ranks, as gradients are by now
        if applied:
            set_adam(self.optimizer, settings)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(applied=applied, grad_norm=norm)

    def sum_gradients(self) -> None:
        """Sum over ranks, not a mean: each token's weight already includes 1 / denominator of the whole step."""
        room = self.config.options.bucket_mib << 20
        bucket: list[torch.Tensor] = []
        for param in self.params.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)  # other ranks may have a gradient
            bucket.append(param.grad)
            if sum(grad.nbytes for grad in bucket) >= room:
                self.sum_over_ranks(bucket)
                bucket = []
        if bucket:
            self.sum_over_ranks(bucket)

    def sum_over_ranks(self, tensors: list[torch.Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        self.policy.eval()
        return forward_outputs(self.outputs, batch, outputs, device=self.device, routers=self.policy.routers)

    def outputs(self, *inputs: Any) -> dict[Output, torch.Tensor]:
        """The policy's outputs, each [T] float32."""
        half = self.config.train.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            found: dict[Output, torch.Tensor] = self.policy(*inputs)
        return found

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        chunks: list[Chunk] = []
        for name, param in self.params.items():
            if key in (StateKey.PARAM, StateKey.MASTER):
                values = param.detach()
            else:
                values = moments(self.optimizer, param, self.adam_step)[key.value]
            start, replica = (0,) * param.dim(), self.context.rank > 0  # rank 0 saves and sends
            chunks += local_chunks(self.boxes[name], start, tuple(param.shape), values, replica=replica)
        return chunks

    def buffers(self) -> Sequence[Chunk]:
        return buffer_chunks(self.policy.model, self.boxes, replica=self.context.rank > 0)

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        match kind:
            case MemoryKind.PARAM:
                return list(self.params.values())
            case MemoryKind.OPTIMIZER:
                return [value for state in self.optimizer.state.values() for value in state.values()]
            case _:
                return []  # parameters are float32 and their own masters; gradients do not outlive a step

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        if adam_step is not None:
            set_adam_step(self.optimizer, adam_step)
