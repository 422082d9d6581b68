"""The halves of an optimizer step, and a pass without gradients, over a sharded policy."""

from __future__ import annotations

import math

import torch
from attrs import evolve
from torch.distributed.fsdp import FSDPModule

from corerl.backend import StepLosses, forward_outputs, set_adam
from corerl.config import OptimizerConfig
from corerl.models import Policy
from corerl.ops import clip_factor, grad_norm, scale_grads
from corerl.pictures import RankTower
from corerl.types import ForwardResult, GradientResult, LossSpec, Metric, Output, PackedBatch, StepResult
from corerl_fsdp.build import end_pass
from corerl_fsdp.scale import LossScale
from corerl_fsdp.shards import LocalShards


def forward_backward(
    policy: Policy,
    batch: PackedBatch,
    loss: LossSpec,
    outputs: tuple[Output, ...],
    *,
    dp_size: int,
    reduce_once: bool,
    keep_gathered: bool,
    loss_scale: LossScale | None,
    aux_loss_coef: float,
    device: torch.device,
    tower: RankTower | None = None,
) -> GradientResult:
    """Called on every rank. One reduce-scatter per unit and micro-batch, or with `reduce_once` per unit and call; one
    all-gather per unit and pass, or with `keep_gathered` per unit and call."""
    assert isinstance(policy, FSDPModule)
    factor = dp_size * (loss_scale.value if loss_scale else 1.0)  # FSDP averages gradients over dp
    policy.train()
    losses = StepLosses(
        policy, batch, loss, outputs, device=device, routers=policy.routers, tower=tower, aux_loss_coef=aux_loss_coef
    )
    for number, value in enumerate(losses, start=1):
        last = number == batch.count
        if last or number == 1:  # each of these goes through all modules
            policy.set_requires_gradient_sync(last or not reduce_once)
            policy.set_reshard_after_backward(last or not keep_gathered)
            policy.set_requires_all_reduce(last)  # among replicas, if any; sums accumulate until then
        (value * factor).backward()
    return losses.result()


def optimizer_step(
    policy: Policy,
    shards: LocalShards,
    optimizer: torch.optim.AdamW,
    *,
    settings: OptimizerConfig,
    scale: float,
    loss_scale: LossScale | None,
    tower: RankTower | None = None,
) -> StepResult:
    """Called on every rank. One all-reduce for the norm, which makes the norm, and the decision to skip, equal on all
    ranks; before it the collectives of `RankTower.reduced`."""
    of_tower = [] if tower is None else tower.reduced()
    factor = scale / (loss_scale.value if loss_scale else 1.0)
    norm = (grad_norm([*of_tower, *shards.trained]) * factor).item()
    result = StepResult(applied=math.isfinite(norm), grad_norm=norm)
    if result.applied:
        factor *= clip_factor(settings.clip_norm, norm)
        set_adam(optimizer, settings)
        shards.step(optimizer, factor)
        if tower is not None:
            scale_grads(of_tower, factor)
            tower.step(settings.lr, settings)
    shards.drop_grads()
    if tower is not None:
        tower.drop_gradients()
    if loss_scale is None:
        return result
    result = evolve(result, metrics={"loss_scale": Metric(loss_scale.value)})
    loss_scale.update(finite=result.applied)
    return result


def forward_pass(
    policy: Policy,
    batch: PackedBatch,
    wanted: tuple[Output, ...],
    *,
    device: torch.device,
    tower: RankTower | None = None,
) -> ForwardResult:
    """Called on every rank. One all-gather per unit and micro-batch, or per unit if weights stay gathered."""
    policy.eval()
    try:
        return forward_outputs(policy, batch, wanted, device=device, routers=policy.routers, tower=tower)
    finally:
        end_pass(policy)
