"""One optimizer step, and one pass without gradients, through DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve
from deepspeed.runtime.engine import DeepSpeedEngine

from corerl.backend.adamw import set_lr
from corerl.backend.passes import StepLosses, forward_outputs
from corerl.types import ForwardResult, LossSpec, MicroBatch, Output, PackedBatch, TrainResult
from corerl_deepspeed.build import Model
from corerl_deepspeed.state import release


def train_step(
    model: Model, batch: PackedBatch, loss: LossSpec, *, lr: float, dp_size: int, device: torch.device
) -> TrainResult:
    """Called on every rank, inside `calling_deepspeed`. Under stages 2 and 3 gradients are reduced after every
    micro-batch, under 1 after the last one; with offload they go to the host in the last backward pass. DeepSpeed
    clips, and finds on all ranks alike that a norm is not finite. Raises Unsupported where a gradient is missing that
    DeepSpeed would make up for with an old one."""
    engine = model.engine
    engine.train()
    announced = evolve(batch, micro_batches=_announced(engine, batch))
    losses = StepLosses(engine, announced, loss, device=device, routers=model.policy.routers)
    for value in losses:
        engine.backward(value * dp_size, scale_wrt_gas=False)  # it averages gradients over dp
        model.watch.check()
    set_lr(model.optimizer, lr)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return TrainResult(
        applied=engine.was_step_applied(), metrics=losses.metrics.finish(), grad_norm=norm, tokens=losses.tokens
    )


def _announced(engine: DeepSpeedEngine, batch: PackedBatch) -> Iterator[MicroBatch]:
    """DeepSpeed is told which micro-batch is the step's last one before it passes through the model."""
    for number, micro in enumerate(batch.micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == batch.count)
        yield micro


def forward_pass(
    model: Model, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """Called on every rank, inside `calling_deepspeed`."""
    model.engine.eval()
    result = forward_outputs(model.engine, batch, wanted, device=device, routers=model.policy.routers)
    release(model)
    return result
