"""The training backend on FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from functools import cached_property

import torch

from corerl.backend import Backend, ExtraState, StateKey, adamw, moments, set_adam_step
from corerl.config import RoleConfig
from corerl.models import buffer_chunks, hf_boxes, hf_config, trained_parameters
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
from corerl_fsdp.build import build_mesh, build_policy, keeps_gathered, reshard
from corerl_fsdp.chunks import shard_chunks
from corerl_fsdp.scale import LossScale
from corerl_fsdp.shards import LocalShards
from corerl_fsdp.step import forward_backward, forward_pass, optimizer_step


class FsdpBackend(Backend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        options = config.options
        mesh = build_mesh(self.device, ranks=context.world_size, shard_size=options.shard_size)
        self.policy = build_policy(
            hf_config(config.model),
            value_head=config.value_head,
            vocabulary=config.model.vocabulary,
            mesh=mesh,
            device=self.device,
            precision=config.train.precision,
            frozen=config.frozen,
            lora=config.lora,
            recompute=config.train.recompute == "full",
            layout=config.train.layout,
            options=options,
            pictures=self.picture_inputs,
        )
        self.keep_gathered = keeps_gathered(self.policy, options, getattr(torch, config.train.precision))
        if (tower := self.policy.tower) is not None:
            self.tower = tower.on_rank(config, device=self.device, group=self.group)
        self.boxes = hf_boxes(self.policy.model)
        on_host = options.offload == "optimizer" and not config.frozen
        trained = trained_parameters(self.policy.model)
        self.shards = LocalShards(self.policy.model, trained, on_host=on_host)
        if not config.frozen:
            self.optimizer = adamw(
                self.shards.params, self.shards.shapes, config.train.optimizer, fused=self.device.type == "cuda"
            )
        self.scale = LossScale() if config.train.precision == "float16" else None
        return ParallelLayout.data_parallel(
            rank=context.rank,
            world_size=context.world_size,
            rectangular=self.policy.rectangular,
            shares_prefixes=config.train.share_prefixes,
        )

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        adds = any(param.grad is not None for param in self.shards.trained)
        return forward_backward(
            self.policy,
            batch,
            loss,
            outputs,
            dp_size=self.layout.dp_size,
            reduce_once=self.config.options.reduces_once(self.layout.dp_size, adds=adds),
            keep_gathered=self.keep_gathered,
            loss_scale=self.scale,
            aux_loss_coef=self.config.train.aux_loss_coef,
            device=self.device,
            tower=self.tower,
        )

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        return optimizer_step(
            self.policy,
            self.shards,
            self.optimizer,
            settings=self.optimizer_at(step),
            scale=scale,
            loss_scale=self.scale,
            tower=self.tower,
        )

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        return forward_pass(self.policy, batch, outputs, device=self.device, tower=self.tower)

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        reshard(self.policy)
        if key is StateKey.PARAM or (key is StateKey.MASTER and self.config.lora is None):
            return self._weights
        held = {name: self.shards.local[name] for name in self.shards.params if self.shards.local[name].numel()}
        if key is not StateKey.MASTER:
            held = {name: moments(self.optimizer, self.shards.params[name], self.adam_step)[key.value] for name in held}
        return shard_chunks(self.shards.dtensors, held, self.boxes)

    @cached_property
    def _weights(self) -> Sequence[Chunk]:
        """Chunks of the weights, cached: shards stay the same, even asleep, and every weight update needs them."""
        held = {name: shard for name, shard in self.shards.local.items() if shard.numel()}
        return shard_chunks(self.shards.dtensors, held, self.boxes)

    def buffers(self) -> Sequence[Chunk]:
        return buffer_chunks(self.policy.model, self.boxes, replica=self.layout.rank > 0)

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        reshard(self.policy)
        match kind:
            case MemoryKind.PARAM:
                return list(self.shards.local.values())
            case MemoryKind.OPTIMIZER:
                return [value for state in self.optimizer.state.values() for value in state.values()]
            case _:
                return []  # shards are float32 and their own masters; gradients do not outlive a step

    def moments_to_come(self) -> int:
        elsewhere = self.config.options.offload == "optimizer" and self.device.type != "cpu"
        return 0 if elsewhere else super().moments_to_come()

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        reshard(self.policy)
        if adam_step is not None:
            set_adam_step(self.optimizer, adam_step)

    def extra_state(self) -> ExtraState:
        return {"loss_scale": self.scale.value, "finite_steps": self.scale.finite_steps} if self.scale else {}

    def load_extra_state(self, state: ExtraState) -> None:
        if self.scale and "loss_scale" in state:
            self.scale = LossScale(value=float(state["loss_scale"]), finite_steps=int(state["finite_steps"]))
