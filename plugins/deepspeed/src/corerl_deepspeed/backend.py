"""The training backend on DeepSpeed's ZeRO."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence, Set
from functools import cached_property

import torch

from corerl.backend import Backend, StateKey, moments, set_adam_step
from corerl.config import RoleConfig
from corerl.errors import Unsupported
from corerl.models import buffer_chunks, hf_config
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
from corerl_deepspeed import state
from corerl_deepspeed.build import build_model
from corerl_deepspeed.chunks import piece_chunks
from corerl_deepspeed.runtime import calling_deepspeed, join, leave
from corerl_deepspeed.spec import NO_FLOAT16
from corerl_deepspeed.step import forward_backward, forward_pass, optimizer_step


class DeepSpeedBackend(Backend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        if config.train.precision == "float16":  # also guards against a driver that did not check the spec
            raise Unsupported(NO_FLOAT16)
        join(self.device, local_rank=context.local_rank)
        with calling_deepspeed(partitioned=False):
            self.model = build_model(
                hf_config(config.model),
                value_head=config.value_head,
                vocabulary=config.model.vocabulary,
                frozen=config.frozen,
                lora=config.lora,
                train=config.train,
                options=config.options,
                device=self.device,
                pictures=self.picture_inputs,
            )
        if (tower := self.model.policy.tower) is not None:
            self.tower = tower.on_rank(config, device=self.device, group=self.group)
        self.working = state.working(self.model)
        self.masters = [] if config.frozen else state.masters(self.model)
        self.partitioned = state.partitioned(self.model)
        return ParallelLayout.data_parallel(
            rank=context.rank,
            world_size=context.world_size,
            rectangular=self.model.policy.rectangular,
            shares_prefixes=config.train.share_prefixes,
        )

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        with calling_deepspeed(partitioned=self.partitioned):
            return forward_backward(
                self.model,
                batch,
                loss,
                outputs,
                last=last,
                dp_size=self.layout.dp_size,
                aux_loss_coef=self.config.train.aux_loss_coef,
                device=self.device,
                tower=self.tower,
            )

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        with calling_deepspeed(partitioned=self.partitioned):
            return optimizer_step(self.model, settings=self.optimizer_at(step), scale=scale, tower=self.tower)

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        with calling_deepspeed(partitioned=self.partitioned):
            return forward_pass(self.model, batch, outputs, device=self.device, tower=self.tower)

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        state.release(self.model)
        if key is StateKey.PARAM:
            return self._weights
        if key is StateKey.MASTER:
            return piece_chunks([master.piece for master in self.masters], self.model.boxes)
        return piece_chunks([master.of(self._moment(master.flat, key)) for master in self.masters], self.model.boxes)

    @cached_property
    def _weights(self) -> Sequence[Chunk]:
        """Chunks of the weights, cached: `working` stays the same, even asleep, and every weight update needs it."""
        # Unless they are partitioned, every rank has the whole, and the first rank saves and sends it.
        replica = not self.partitioned and self.layout.rank > 0
        return piece_chunks(self.working, self.model.boxes, replica=replica)

    def buffers(self) -> Sequence[Chunk]:
        return buffer_chunks(self.model.policy.model, self.model.boxes, replica=self.layout.rank > 0)

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        state.release(self.model)
        match kind:
            case MemoryKind.PARAM:
                return list(state.parameter_memory(self.model))
            case MemoryKind.MASTER:
                return state.flats(self.model)
            case MemoryKind.GRAD:
                return list(state.gradient_memory(self.model))
            case MemoryKind.OPTIMIZER:
                return [value for values in self.optimizer.state.values() for value in values.values()]

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        state.release(self.model)
        if StateKey.MASTER in keys:
            with calling_deepspeed(partitioned=self.partitioned):
                state.spread(self.model, self.working, self.masters)
        state.drop_second_copies(self.model)
        if adam_step is not None:
            set_adam_step(self.optimizer, adam_step)

    def shutdown(self, reason: str) -> None:
        with contextlib.ExitStack() as closing:  # each, whatever the others raise
            closing.callback(leave)
            if hasattr(self, "model"):
                closing.callback(state.let_go, self.model)
            super().shutdown(reason)

    def _moment(self, flat: torch.Tensor, key: StateKey) -> torch.Tensor:
        return moments(self.optimizer, flat, self.adam_step)[key.value]

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW, of a role that is trained."""
        assert self.model.optimizer is not None
        return self.model.optimizer
