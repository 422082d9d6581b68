"""The training backend on megatron-core."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():  # must come first: import warnings are raised once, and are not for the user
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from corerl.backend import Backend, StateKey
from corerl.config import RoleConfig
from corerl.errors import ModelError, Unsupported
from corerl.models import hf_config
from corerl.plugin import Context
from corerl.types import (
    ForwardResult,
    GradientResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    ParallelLayout,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
)
from corerl.weights import Chunk
from corerl_megatron import native
from corerl_megatron.build import Source, Table, build, take_apart
from corerl_megatron.families import architecture, unsupported_by
from corerl_megatron.on_host import calling_megatron
from corerl_megatron.optimizer import masters, set_adam_step
from corerl_megatron.parallel import destroy_groups, forget_rotary_tables, layout, make_groups
from corerl_megatron.replay import Routing
from corerl_megatron.rotary import turn_all_at_once
from corerl_megatron.step import Gradients, Pipeline, forward_backward, forward_pass, optimizer_step


class MegatronBackend(Backend):
    gathers_pending = False  # the last step left parameters to be gathered in the next forward pass

    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        if config.train.precision == "float16":  # both also guard against a driver that did not check the spec
            raise Unsupported("float16 needs a loss scale, which this backend does not have; use bfloat16")
        if config.train.layout == "whole":
            raise Unsupported("megatron-core's models pack sequences; set train.layout to 'auto' or 'packed'")
        source = _source(config)
        turn_all_at_once()
        with calling_megatron(self.device):
            self.groups = make_groups(config.options, timeout=config.timeout, device=self.device)
            self.model = build(config, source, self.groups, device=self.device)
            self.masters = masters(self.model)
        self.pipeline = Pipeline(
            model=self.model,
            routing=Routing.of(self.model.chunks, self.model.config, self.groups),
            groups=self.groups,
            balance_coef=config.train.aux_loss_coef,
            vocabulary=config.model.vocabulary or source.vocabulary,
            device=self.device,
        )
        self.gradients = Gradients()
        return layout(config.options, self.groups, rank=context.rank, ranks=context.world_size)

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        with calling_megatron(self.device):
            return forward_backward(self.pipeline, self.gradients, batch, loss, outputs, last=last)

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        with calling_megatron(self.device):
            result = optimizer_step(self.pipeline, self.gradients, settings=self.optimizer_at(step), scale=scale)
        self.gathers_pending |= result.applied and self.config.options.overlap_param_gather
        return result

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        with calling_megatron(self.device):
            return forward_pass(self.pipeline, batch, outputs)

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        self._finish_gathers()
        if key is StateKey.PARAM:
            return self._weights
        chunks: list[Chunk] = []
        for held in self.model.held:
            master = self.masters.get(held.param)
            if master is None:
                continue  # stepped only on other ranks
            values = master.tensor.detach() if key is StateKey.MASTER else master.moment(key.value)
            chunks += held.chunks(values, master.start)
        return chunks

    @cached_property
    def _weights(self) -> Sequence[Chunk]:
        """Chunks of the weights, cached: parameters stay in place, even asleep, and every weight update needs them."""
        return [chunk for held in self.model.held for chunk in held.chunks(held.param.detach())]

    def buffers(self) -> Sequence[Chunk]:
        return [chunk for held in self.model.buffers for chunk in held.chunks(held.param)]

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        self._finish_gathers()
        match kind:
            case MemoryKind.PARAM:
                return [held.param.data for held in self.model.held]
            case MemoryKind.GRAD:
                return [buffer.grad_data for chunk in self.model.chunks for buffer in _buffers(chunk)]
            case MemoryKind.MASTER:
                return [master.tensor for master in self.masters.values() if master.apart]
            case MemoryKind.OPTIMIZER:
                return [
                    value
                    for master in self.masters.values()
                    for value in master.inner.state.get(master.tensor, {}).values()
                    if isinstance(value, torch.Tensor)
                ]

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        if StateKey.MASTER in keys:
            with torch.no_grad():
                for param, master in self.masters.items():
                    if master.apart:
                        start = master.start or 0
                        param.data.view(-1)[start : start + master.tensor.numel()].copy_(master.tensor.view(-1))
            if self.config.options.distributed_optimizer:
                with calling_megatron(self.device):
                    for chunk in self.model.chunks:
                        chunk.start_param_sync(force_sync=True)
        if adam_step is not None:
            set_adam_step(self.model, adam_step)

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        if not self.config.options.native_checkpoint:
            return super().save(path, step, background)
        with native.failing_together():
            result = super().save(path, step, background)
        with calling_megatron(self.device):
            native.write(self.model, Path(path) / native.DIRECTORY, step)
        return result

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        forget_rotary_tables()
        return super().sleep(kinds)

    def explained(self, hook: str, error: BaseException) -> str:
        pending, self.gathers_pending = self.gathers_pending, False  # a single rank cannot gather
        try:
            return super().explained(hook, error)
        finally:
            self.gathers_pending = pending

    def shutdown(self, reason: str) -> None:
        try:
            super().shutdown(reason)
        finally:  # the last save may have failed
            if hasattr(self, "model"):
                take_apart(self.model)
            if hasattr(self, "groups"):
                destroy_groups(self.groups)

    def _finish_gathers(self) -> None:
        """Gather now what a step left to be gathered in the next forward pass."""
        if self.gathers_pending:
            with calling_megatron(self.device):
                for chunk in self.model.chunks:
                    chunk.start_param_sync(force_sync=True)
            self.gathers_pending = False


def _source(role: RoleConfig) -> Source:
    config = hf_config(role.model)
    if role.options.bridge:
        from corerl_megatron.bridge import Bridged

        return Bridged.of(config, value_head=role.value_head)
    fields = config.to_dict()
    if reason := unsupported_by(fields):
        raise ModelError(reason)
    return Table(architecture(fields, value_head=role.value_head))


def _buffers(chunk: DistributedDataParallel) -> Iterator[Any]:
    yield from chunk.buffers
    yield from chunk.expert_parallel_buffers
