"""AdamW over a rank's own tensors: weight-decay groups, moments, and one step count for all."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from corerl.config.schema import OptimizerConfig
from corerl.ops.clip import scale_grads

DECAYED = "decayed"  # of a group of parameters: whether weight decay applies to it


def adamw(
    params: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    config: OptimizerConfig,
    *,
    fused: bool,
    frozen: Collection[str] = (),
) -> torch.optim.AdamW:
    """AdamW with `weight_decay` on matrices that are not `frozen`, but for biases of several experts in one tensor.
    Parameters without elements on this rank are left out; if none remains, steps do nothing.

    `shapes` are the full tensors' shapes, since a shard of a matrix may look like a norm.
    """
    held = {name: param for name, param in params.items() if param.numel()}
    decayed = {name for name in held if len(shapes[name]) >= 2 and not name.endswith("bias") and name not in frozen}
    groups = [
        {"params": [held[name] for name in held if name in decayed], DECAYED: True},
        {"params": [held[name] for name in held if name not in decayed], DECAYED: False},
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]  # torch takes an empty group, not zero groups
    betas, eps = config.betas, config.eps
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=eps, foreach=not fused, fused=fused)
    set_adam(optimizer, config)
    return optimizer


def set_adam(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Set learning rate, betas, eps and weight decay of all groups of `adamw`, as `Backend.optimizer_at` gives them for
    a step. What is not decayed stays so."""
    set_lr(optimizer, config.lr)
    for group in optimizer.param_groups:
        decay = config.weight_decay if group[DECAYED] else 0.0
        group.update(betas=config.betas, eps=config.eps, weight_decay=decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_scaled(optimizer: torch.optim.AdamW, factor: float) -> None:
    """Step with the gradients times `factor`, which they may be multiplied by in place. Where `adamw` is fused, that is
    part of the step's own pass over them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    divisor = 1.0 / factor if factor else math.inf
    tiny = torch.finfo(torch.float32).max < divisor < math.inf
    if factor == 1.0 or tiny or not params or not optimizer.param_groups[0]["fused"]:
        scale_grads(params, factor)
        optimizer.step()
        return
    # As torch.amp.GradScaler sets it. Made on the device: a copy from the host would wait for it.
    grad_scale = torch.full((), divisor, dtype=torch.float32, device=params[0].device)
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def moments(optimizer: torch.optim.Optimizer, param: torch.Tensor, adam_step: int) -> dict[str, torch.Tensor]:
    """Adam's state for `param`, created as zeros if no step has been taken yet."""
    state: dict[str, torch.Tensor] = optimizer.state[param]
    if not state:
        fused = bool(optimizer.param_groups[0]["fused"])
        state["step"] = torch.tensor(float(adam_step), dtype=torch.float32, device=param.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    return state


def set_adam_step(optimizer: torch.optim.Optimizer, adam_step: int) -> None:
    """Set the number of applied steps that bias correction counts."""
    for state in optimizer.state.values():
        state["step"].fill_(float(adam_step))
