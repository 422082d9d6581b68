"""The hooks, on FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch.distributed.device_mesh import init_device_mesh

from corerl.backend import Backend, StateKey
from corerl.backend.adamw import adamw, moments, set_adam_step
from corerl.config.schema import RoleConfig
from corerl.models.config import hf_config
from corerl.models.names import hf_boxes
from corerl.plugin.context import Context
from corerl.types import (
    ForwardResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    ParallelLayout,
    Step,
    TrainResult,
)
from corerl.weights.chunks import Chunk
from corerl_fsdp.build import build_policy, reshard
from corerl_fsdp.chunks import shard_chunks
from corerl_fsdp.shards import LocalShards
from corerl_fsdp.step import forward_pass, train_step


class FsdpBackend(Backend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        mesh = init_device_mesh(self.device.type, (context.world_size,), mesh_dim_names=("dp",))
        self.policy = build_policy(
            hf_config(config.model),
            mesh=mesh,
            device=self.device,
            precision=config.train.precision,
            reshard_after_forward=config.options.reshard_after_forward,
        )
        self.boxes = hf_boxes(self.policy.model)
        self.shards = LocalShards(self.policy.model)
        self.optimizer = adamw(
            self.shards.params, self.shards.shapes, config.train.optimizer, fused=self.device.type == "cuda"
        )
        self.applied = 0
        rank, size = mesh.get_local_rank(), mesh.size()
        return ParallelLayout(rank=rank, world_size=size, dp_rank=rank, dp_size=size)

    @property
    def adam_step(self) -> int:
        return self.applied

    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        result = train_step(
            self.policy,
            self.shards,
            self.optimizer,
            batch,
            loss,
            lr=step.lr,
            clip_norm=self.config.train.optimizer.clip_norm,
            dp_size=self.layout.dp_size,
            device=self.device,
        )
        self.applied += result.applied
        return result

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        with self.using(weights):
            return forward_pass(self.policy, batch, outputs, device=self.device)

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        reshard(self.policy)
        held = {name: param for name, param in self.shards.params.items() if param.numel()}
        if key in (StateKey.PARAM, StateKey.MASTER):
            values: dict[str, torch.Tensor] = {name: param.detach() for name, param in held.items()}
        else:
            values = {name: moments(self.optimizer, param, self.applied)[key.value] for name, param in held.items()}
        return shard_chunks(self.shards.dtensors, values, self.boxes)

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        reshard(self.policy)
        match kind:
            case MemoryKind.PARAM:
                return list(self.shards.params.values())
            case MemoryKind.OPTIMIZER:
                return [value for state in self.optimizer.state.values() for value in state.values()]
            case _:
                return []  # shards are float32 and their own masters; gradients do not outlive a step

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        reshard(self.policy)
        if adam_step is not None:
            self.applied = adam_step
            set_adam_step(self.optimizer, adam_step)
