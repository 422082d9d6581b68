"""One optimizer step, and one pass without gradients, over a sharded policy."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.distributed.fsdp import FSDPModule

from corerl.backend import MetricSum, resolve_loss
from corerl.backend.adamw import set_lr
from corerl.backend.batches import OutputCollector, to_device
from corerl.models.policy import CausalPolicy
from corerl.ops.clip import grad_norm, scale_grads
from corerl.types import ForwardResult, LossSpec, Metric, Output, PackedBatch, TrainResult
from corerl_fsdp.build import reshard
from corerl_fsdp.scale import LossScale
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
    sync: Literal["every", "last"],
    scale: LossScale | None,
    device: torch.device,
) -> TrainResult:
    """Called on every rank. One reduce-scatter a unit and micro-batch (a step, where `sync` is "last"), one all-reduce
    for the norm, which is therefore equal on all ranks, as is the decision to skip."""
    assert isinstance(policy, FSDPModule)
    loss_function = resolve_loss(loss)
    metrics = MetricSum()
    tokens = 0
    scaled_by = scale.value if scale else 1.0
    policy.train()
    for number, micro in enumerate(batch.micro_batches, start=1):
        last = number == batch.count
        policy.set_requires_gradient_sync(last or sync == "every")
        policy.set_requires_all_reduce(last)  # among replicas, where there are any: their sums add up until then
        inputs = to_device(micro, device)
        outputs = policy(inputs.tokens, inputs.packing, inputs.positions, batch.temperature, loss.outputs)
        result = loss_function(inputs.loss_inputs(outputs))
        # FSDP averages gradients over dp, and the tokens' weights already hold 1 / denominator of the whole step.
        (result.loss * (dp_size * scaled_by)).backward()
        metrics.add(result.metrics)
        tokens += len(micro.tokens)
    params = list(policy.parameters())
    norm = grad_norm(params) / scaled_by
    value = norm.item()
    applied = math.isfinite(value)
    if applied:
        if scale:
            scale.unscale(params)
        if clip_norm:
            scale_grads(params, clip_norm, norm)
        set_lr(optimizer, lr)
        shards.step(optimizer)
    shards.drop_grads()
    found = dict(metrics.finish())
    if scale:
        found["loss_scale"] = Metric(scaled_by)
        scale.update(finite=applied)
    return TrainResult(applied=applied, metrics=found, grad_norm=value, tokens=tokens)


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
