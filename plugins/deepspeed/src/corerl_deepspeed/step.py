"""One optimizer step, and one pass without gradients, through DeepSpeed's engine."""

from __future__ import annotations

import torch

from corerl.backend import MetricSum, resolve_loss
from corerl.backend.adamw import set_lr
from corerl.backend.batches import OutputCollector, to_device
from corerl.types import ForwardResult, LossSpec, Output, PackedBatch, TrainResult
from corerl_deepspeed.build import Model
from corerl_deepspeed.state import release


def train_step(
    model: Model, batch: PackedBatch, loss: LossSpec, *, lr: float, dp_size: int, device: torch.device
) -> TrainResult:
    """Called on every rank, inside `calling_deepspeed`. Under stages 2 and 3 gradients are reduced after every
    micro-batch, under 1 after the last one. DeepSpeed clips, and finds on all ranks alike that a norm is not finite."""
    engine, loss_function = model.engine, resolve_loss(loss)
    metrics = MetricSum()
    tokens = 0
    engine.train()
    for micro in batch.micro_batches:
        inputs = to_device(micro, device)
        outputs = engine(inputs.tokens, inputs.packing, inputs.positions, batch.temperature, loss.outputs)
        result = loss_function(inputs.loss_inputs(outputs))
        # It averages gradients over dp, and the tokens' weights already hold 1 / denominator of the whole step.
        engine.backward(result.loss * dp_size, scale_wrt_gas=False)
        metrics.add(result.metrics)
        tokens += len(micro.tokens)
    set_lr(model.optimizer, lr)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return TrainResult(applied=engine.was_step_applied(), metrics=metrics.finish(), grad_norm=norm, tokens=tokens)


@torch.no_grad()
def forward_pass(
    model: Model, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """Called on every rank, inside `calling_deepspeed`."""
    collector = OutputCollector()
    model.engine.eval()
    for micro in batch.micro_batches:
        inputs = to_device(micro, device)
        outputs = model.engine(inputs.tokens, inputs.packing, inputs.positions, batch.temperature, wanted)
        collector.add(micro, outputs)
    release(model)
    return collector.finish(wanted)
