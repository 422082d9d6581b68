"""AdamW with one step count per group, like the FusedAdam of TransformerEngine and Apex.

megatron-core's distributed optimizer is written for those two. It falls back to torch's own AdamW, but cannot resume
with that: all parameters end up sharing one step tensor, so that one update counts many times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class GroupStepAdamW(torch.optim.AdamW):
    """AdamW with FusedAdam's arguments (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", alg. 2)."""

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **options: Any) -> None:
        assert adam_w_mode  # CoreRL always uses AdamW
        super().__init__(params, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's own expects a step for each parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            group["step"] = step = group.get("step", 0) + 1
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            grads = [param.grad for param in params]
            averages = [self.state[param]["exp_avg"] for param in params]
            squares = [self.state[param]["exp_avg_sq"] for param in params]
            (beta1, beta2), lr = group["betas"], group["lr"]
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_lerp_(averages, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            divisors = torch._foreach_sqrt(squares)
            torch._foreach_div_(divisors, math.sqrt(1 - beta2**step))
            torch._foreach_add_(divisors, group["eps"])
            torch._foreach_addcdiv_(params, averages, divisors, -lr / (1 - beta1**step))


@contextmanager
def fused_adam() -> Iterator[None]:
    """If megatron-core found no FusedAdam, make it use `GroupStepAdamW` in its place within the block."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        yield
        return
    with (
        mock.patch.object(optimizer, "Adam", GroupStepAdamW),
        mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(distrib_optimizer, "Adam", GroupStepAdamW),
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ):
        yield
