"""One optimizer step, and one pass without gradients, over a sharded policy."""

from __future__ import annotations

import math

import torch

from corerl.backend import MetricSum, resolve_loss
from corerl.backend.adamw import set_lr
from corerl.backend.batches import OutputCollector, to_device
from corerl.models.policy import CausalPolicy
from corerl.ops.clip import grad_norm, scale_grads
from corerl.types import ForwardResult, LossSpec, Output, PackedBatch, TrainResult
from corerl_fsdp.build import reshard
from corerl_fsdp.shards import LocalShards


def train_step(
    policy: CausalPolicy,
    shards: LocalShards,
    optimizer: torch.optim.Optimizer,
    batch: PackedBatch,
    loss: LossSpec,
    *,
    lr: float,
    clip_norm: float,
    dp_size: int,
    device: torch.device,
) -> TrainResult:
    """Called on every rank. One reduce-scatter a unit and micro-batch, one all-reduce for the norm, which is therefore
    equal on all ranks, as is the decision to skip."""
    loss_function = resolve_loss(loss)
    metrics = MetricSum()
    tokens = 0
    policy.train()
    for micro in batch.micro_batches:
        inputs = to_device(micro, device)
        outputs = policy(inputs.tokens, inputs.packing, inputs.positions, batch.temperature, loss.outputs)
        result = loss_function(inputs.loss_inputs(outputs))
        # FSDP averages gradients over dp, and the tokens' weights already hold 1 / denominator of the whole step.
        (result.loss * dp_size).backward()
        metrics.add(result.metrics)
        tokens += len(micro.tokens)
    params = list(policy.parameters())
    norm = grad_norm(params)
    value = norm.item()
    applied = math.isfinite(value)
    if applied:
        if clip_norm:
            scale_grads(params, clip_norm, norm)
        set_lr(optimizer, lr)
        shards.take_grads()
        optimizer.step()
    shards.drop_grads()
    return TrainResult(applied=applied, metrics=metrics.finish(), grad_norm=value, tokens=tokens)


@torch.no_grad()
def forward_pass(
    policy: CausalPolicy, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """Called on every rank. One all-gather a unit and micro-batch."""
    collector = OutputCollector()
    policy.eval()
    for micro in batch.micro_batches:
        inputs = to_device(micro, device)
        outputs = policy(inputs.tokens, inputs.packing, inputs.positions, batch.temperature, wanted)
        collector.add(micro, outputs)
    reshard(policy)
    return collector.finish(wanted)
