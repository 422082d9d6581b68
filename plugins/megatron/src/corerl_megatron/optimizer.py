"""Find each parameter's float32 master and moments in megatron-core's optimizer, and take a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from corerl.config import OptimizerConfig
from corerl.ops import scale_grads
from corerl_megatron.build import Model


@frozen(eq=False)
class Master:
    """The tensor that is stepped for a parameter: the parameter itself, a float32 copy, or a flat range of either."""

    tensor: Tensor  # the key of the moments in the inner optimizer's state
    inner: torch.optim.Optimizer
    start: int | None  # the parameter's element at which the flat range begins; None if it is the whole, not flat
    apart: bool  # whether it has its own memory

    def moment(self, key: str) -> Tensor:
        """A moment, created as zeros if no step has been taken yet."""
        state: dict[str, Tensor] = self.inner.state[self.tensor]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(self.tensor)
        return state[key]


def masters(model: Model) -> dict[Tensor, Master]:
    """The masters by parameter, without parameters that a distributed optimizer steps only on other ranks."""
    return {param: master for optimizer in _parts(model) for param, master in _masters(optimizer)}


def _masters(optimizer: Any) -> Iterator[tuple[nn.Parameter, Master]]:
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        pairs = (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, True),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups, False),
        )
        for models, shards, apart in pairs:
            for params, tensors in zip(models, shards, strict=True):
                for param, tensor in zip(params, tensors, strict=True):
                    start = optimizer._get_model_param_range_map(param)["param"].start
                    yield param, Master(tensor, inner, start, apart)
        return
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for params, tensors in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for param, tensor in zip(params, tensors, strict=True):
                yield param, Master(tensor, inner, None, True)
        whole = [param for group in optimizer.fp32_from_fp32_groups for param in group]
    else:
        whole = [param for group in inner.param_groups for param in group["params"]]
    for param in whole:
        yield param, Master(param, inner, None, False)


def _parts(model: Model) -> list[Any]:
    """The optimizers of dense parameters and of experts, without those that have no parameters; none if the role is
    frozen."""
    if model.optimizer is None:
        return []
    return [part for part in model.optimizer.chained_optimizers if not part.is_stub_optimizer]


def step(model: Model, *, settings: OptimizerConfig, scale: float) -> tuple[bool, float]:
    """Take a step with the reduced gradients times `scale`, on every rank. Returns whether it was applied, and the
    gradient's norm before clipping, both equal on all ranks."""
    optimizer = model.optimizer
    optimizer.prepare_grads()
    if scale != 1.0:
        for part in _parts(model):
            scale_grads(part.get_parameters(), scale)  # only those that this rank steps
    norm = float(optimizer.get_grad_norm())
    if not optimizer.config.use_distributed_optimizer:
        norm = _agreed(norm, next(model.chunks[0].parameters()).device)
    applied = math.isfinite(norm)
    if applied:
        if settings.clip_norm:
            for part in _parts(model):
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=settings.clip_norm, total_norm=norm)
        for group in optimizer.param_groups:
            # megatron-core only sets these in its own scheduler; without that, norms would be decayed too.
            group["lr"] = settings.lr * group["lr_mult"]
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            group.update(betas=settings.betas, eps=settings.eps)
        optimizer.step_with_ready_grads()
        if optimizer.config.overlap_param_gather:
            _gather_again(model)
    optimizer.zero_grad()
    return applied, norm


def _gather_again(model: Model) -> None:
    """Make the next forward pass gather the parameters. megatron-core sees to this as it reduces gradients, but since
    then a pass, or a gather for a weight update, may have come, after which it would leave old parameters in use."""
    for chunk in model.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.param_gather_dispatched = False


def _agreed(norm: float, device: torch.device) -> float:
    """The largest of all ranks' norms: each copy of the model has summed its own, perhaps in another order."""
    largest = torch.tensor(norm, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def set_adam_step(model: Model, applied: int) -> None:
    for group in model.optimizer.param_groups:
        group["step"] = applied
