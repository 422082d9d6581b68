"""One optimizer step, and one pass without gradients, through DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve
from deepspeed.runtime.engine import DeepSpeedEngine

from corerl.backend import StepLosses, forward_outputs, set_lr
from corerl.types import ForwardResult, LossSpec, MicroBatch, Output, PackedBatch, TrainResult
from corerl_deepspeed.build import Model
from corerl_deepspeed.state import release


def train_step(
    model: Model, batch: PackedBatch, loss: LossSpec, *, lr: float, dp_size: int, device: torch.device
) -> TrainResult:
    """Called on every rank, inside `calling_deepspeed`. Stages 2 and 3 reduce gradients after every micro-batch, stage
    1 after the last one; with offload they go to the host in the last backward pass. DeepSpeed clips, and skips a step
    whose norm is not finite, on all ranks alike. Raises Unsupported if a gradient is missing for which DeepSpeed would
    use an old one."""
    engine, optimizer, watch = model.engine, model.optimizer, model.watch
    assert optimizer is not None and watch is not None  # it is trained
    engine.train()
    announced = evolve(batch, micro_batches=_announced(engine, batch))
    losses = StepLosses(engine, announced, loss, device=device, routers=model.policy.routers)
    for value in losses:
        engine.backward(value * dp_size, scale_wrt_gas=False)  # DeepSpeed averages gradients over dp
        watch.check()
    set_lr(optimizer, lr)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return TrainResult(
        applied=engine.was_step_applied(), metrics=losses.metrics.finish(), grad_norm=norm, tokens=losses.tokens
    )


def _announced(engine: DeepSpeedEngine, batch: PackedBatch) -> Iterator[MicroBatch]:
    """The micro-batches; before the step's last one passes through the model, DeepSpeed is told that it is the last."""
    for number, micro in enumerate(batch.micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == batch.count)
        yield micro


def forward_pass(
    model: Model, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """Compute outputs without gradients. Called on every rank, inside `calling_deepspeed`."""
    model.engine.eval()
    result = forward_outputs(model.engine, batch, wanted, device=device, routers=model.policy.routers)
    release(model)
    return result
