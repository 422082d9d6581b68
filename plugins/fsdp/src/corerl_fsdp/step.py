"""One optimizer step, and one pass without gradients, over a sharded policy."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.distributed.fsdp import FSDPModule

from corerl.backend import StepLosses, forward_outputs, set_lr
from corerl.models import Policy
from corerl.ops import grad_norm, scale_grads
from corerl.types import ForwardResult, LossSpec, Metric, Output, PackedBatch, TrainResult
from corerl_fsdp.build import reshard
from corerl_fsdp.scale import LossScale
from corerl_fsdp.shards import LocalShards


def train_step(
    policy: Policy,
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
    """Called on every rank. One reduce-scatter per unit and micro-batch (per unit and step if `sync` is "last"), and
    one all-reduce for the norm, which makes the norm, and the decision to skip, equal on all ranks."""
    assert isinstance(policy, FSDPModule)
    scaled_by = scale.value if scale else 1.0
    policy.train()
    losses = StepLosses(policy, batch, loss, device=device, routers=policy.routers)
    for number, value in enumerate(losses, start=1):
        last = number == batch.count
        policy.set_requires_gradient_sync(last or sync == "every")
        policy.set_requires_all_reduce(last)  # among replicas, if any; sums accumulate until then
        (value * (dp_size * scaled_by)).backward()  # FSDP averages gradients over dp
    params = list(policy.parameters())
    norm = grad_norm(params) / scaled_by
    grad_norm_value = norm.item()
    applied = math.isfinite(grad_norm_value)
    if applied:
        if scale:
            scale.unscale(params)
        if clip_norm:
            scale_grads(params, clip_norm, norm)
        set_lr(optimizer, lr)
        shards.step(optimizer)
    shards.drop_grads()
    metrics = dict(losses.metrics.finish())
    if scale:
        metrics["loss_scale"] = Metric(scaled_by)
        scale.update(finite=applied)
    return TrainResult(applied=applied, metrics=metrics, grad_norm=grad_norm_value, tokens=losses.tokens)


def forward_pass(
    policy: Policy, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """Called on every rank. One all-gather per unit and micro-batch."""
    policy.eval()
    result = forward_outputs(policy, batch, wanted, device=device, routers=policy.routers)
    reshard(policy)
    return result
