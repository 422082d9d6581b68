"""The halves of an optimizer step, and a pass without gradients, through DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from attrs import evolve
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from corerl.backend import StepLosses, forward_outputs, set_adam
from corerl.config import OptimizerConfig
from corerl.ops import clip_factor, grad_norm, scale_grads
from corerl.pictures import RankTower
from corerl.types import ForwardResult, GradientResult, LossSpec, MicroBatch, Output, PackedBatch, StepResult
from corerl_deepspeed.build import Model
from corerl_deepspeed.state import drop_skipped_gradients, release


def forward_backward(
    model: Model,
    batch: PackedBatch,
    loss: LossSpec,
    outputs: tuple[Output, ...],
    *,
    last: bool,
    dp_size: int,
    aux_loss_coef: float,
    device: torch.device,
    tower: RankTower | None = None,
) -> GradientResult:
    """Called on every rank, inside `calling_deepspeed`. Stages 2 and 3 reduce gradients after every micro-batch. After
    the step's last one, if it is known to be that, stage 1 reduces them, and with offload they go to the host. Raises
    Unsupported if a gradient is missing for which DeepSpeed would use an old one."""
    engine, watch = model.engine, model.watch
    assert watch is not None  # it is trained
    engine.train()
    announced = evolve(batch, micro_batches=_announced(engine, batch, last))
    routers = model.policy.routers
    losses = StepLosses(
        engine, announced, loss, outputs, device=device, routers=routers, tower=tower, aux_loss_coef=aux_loss_coef
    )
    for value in losses:
        engine.backward(value * dp_size, scale_wrt_gas=False)  # DeepSpeed averages gradients over dp
        watch.check()
    return losses.result()


def _announced(engine: DeepSpeedEngine, batch: PackedBatch, last: bool) -> Iterator[MicroBatch]:
    """The micro-batches; before the step's last one passes through the model, DeepSpeed is told that it is the last."""
    for number, micro in enumerate(batch.micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(last and number == batch.count)
        yield micro


def optimizer_step(
    model: Model, *, settings: OptimizerConfig, scale: float, tower: RankTower | None = None
) -> StepResult:
    """Called on every rank, inside `calling_deepspeed`. DeepSpeed clips, and skips a step whose norm is not finite, on
    all ranks alike. A `tower` that is trained is part of the norm, clipped as the rest is, and stepped with it."""
    params = [] if tower is None else tower.reduced()
    if not params or tower is None:
        return _step(model, settings=settings, scale=scale)
    with _in_the_norm(model.engine.optimizer, grad_norm(params)):
        result = _step(model, settings=settings, scale=scale)
    if result.applied:
        scale_grads(params, scale * clip_factor(settings.clip_norm, result.grad_norm))
        tower.step(settings.lr, settings)
    tower.drop_gradients()
    return result


@contextmanager
def _in_the_norm(optimizer: Any, norm: torch.Tensor) -> Iterator[None]:
    """Within the block, the norm by which DeepSpeed (0.19.8) clips, and skips steps, is also of gradients that it does
    not have, whose own is `norm`: it has no setting for that."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        name, of_groups = "_get_norm_groups", optimizer._get_norm_groups

        def joined() -> Any:
            groups = of_groups()  # on the host with offload
            return [*groups, *(norm.to(each.device) for each in groups[:1])]
    else:
        name, of_all = "scaled_global_norm", optimizer.scaled_global_norm

        def joined() -> Any:
            own = of_all()
            return torch.linalg.vector_norm(torch.stack([own, norm.to(own.device)]))

    with mock.patch.object(optimizer, name, joined):
        yield


def _step(model: Model, *, settings: OptimizerConfig, scale: float) -> StepResult:
    engine, optimizer = model.engine, model.optimizer
    assert optimizer is not None  # it is trained
    if not engine.is_gradient_accumulation_boundary():
        _complete(engine)
    set_adam(optimizer, settings)
    engine.optimizer.clip_grad = settings.clip_norm  # DeepSpeed reads its config only as it starts
    if scale == 1.0:
        engine.step()
    else:
        # DeepSpeed divides gradients by their loss scale when it clips them, and the norm that it reports; it clips by
        # the divided norm. So this reaches them wherever they are, with offload too, in one multiplication.
        engine.optimizer.override_loss_scale(1.0 / scale)
        engine.step()
        engine.optimizer.override_loss_scale(1.0)  # backward passes would multiply losses by it
    applied = engine.was_step_applied()
    if not applied:
        drop_skipped_gradients(model)
    return StepResult(applied=applied, grad_norm=float(engine.get_global_grad_norm()))


def _complete(engine: DeepSpeedEngine) -> None:
    """Do what no backward pass has done, since none was known to be the last: reduce gradients in stage 1, collect them
    in stage 2, and bring them to the host with offload. `engine.step` does the same, by the same methods, where
    managed_gradient_accumulation is off; that would keep it from doing so during the last pass."""
    engine.set_gradient_accumulation_boundary(True)
    if engine.zero_optimization_partition_gradients():  # stages 2 and 3
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()


def forward_pass(
    model: Model,
    batch: PackedBatch,
    wanted: tuple[Output, ...],
    *,
    device: torch.device,
    tower: RankTower | None = None,
) -> ForwardResult:
    """Compute outputs without gradients. Called on every rank, inside `calling_deepspeed`."""
    model.engine.eval()
    result = forward_outputs(model.engine, batch, wanted, device=device, routers=model.policy.routers, tower=tower)
    release(model)
    return result
