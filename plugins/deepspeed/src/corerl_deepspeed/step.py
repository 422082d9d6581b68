"""One optimizer step, and one pass without gradients, through DeepSpeed's engine."""

from __future__ import annotations

import torch

from corerl.backend.adamw import set_lr
from corerl.backend.passes import StepLosses, forward_outputs
from corerl.types import ForwardResult, LossSpec, Output, PackedBatch, TrainResult
from corerl_deepspeed.build import Model
from corerl_deepspeed.state import release


def train_step(
    model: Model, batch: PackedBatch, loss: LossSpec, *, lr: float, dp_size: int, device: torch.device
) -> TrainResult:
    """Called on every rank, inside `calling_deepspeed`. Under stages 2 and 3 gradients are reduced after every
    micro-batch, under 1 after the last one. DeepSpeed clips, and finds on all ranks alike that a norm is not finite."""
    engine = model.engine
    engine.train()
    losses = StepLosses(engine, batch, loss, device=device)
    for value in losses:
        engine.backward(value * dp_size, scale_wrt_gas=False)  # it averages gradients over dp
    set_lr(model.optimizer, lr)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return TrainResult(
        applied=engine.was_step_applied(), metrics=losses.metrics.finish(), grad_norm=norm, tokens=losses.tokens
    )


def forward_pass(
    model: Model, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """Called on every rank, inside `calling_deepspeed`."""
    model.engine.eval()
    result = forward_outputs(model.engine, batch, wanted, device=device)
    release(model)
    return result
