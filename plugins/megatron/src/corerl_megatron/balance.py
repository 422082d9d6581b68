"""The loss that balances the load of experts: each router adds its part of the gradient as tokens pass it.

megatron-core has one of its own, which counts padding and fillers as tokens, and multiplies its gradient by a number
of tokens that is another one in each version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from corerl.backend.batches import unpadded
from corerl.types import BoolArray, Metric, MicroBatch
from corerl_megatron.parallel import Groups

LOSS = "load_balancing_loss"  # the metric


def counted(micro: MicroBatch) -> BoolArray:
    """[T] False in padding, and in fillers."""
    counts: BoolArray = unpadded(micro) & np.repeat(micro.samples >= 0, np.diff(micro.cu_seqlens))
    return counts


@frozen(kw_only=True, eq=False)
class Balance:
    """Of one optimizer step: the loss is a mean over its tokens, so a micro-batch weighs as many as it has."""

    coef: float
    tokens: float  # of the step, on all ranks
    parts: list[Tensor] = field(factory=list)  # each [], this rank's of the loss so far

    @classmethod
    def of(cls, coef: float, micro_batches: Iterable[MicroBatch], groups: Groups) -> Balance:
        """Called on every rank; goes over the micro-batches."""
        tokens = torch.tensor(float(sum(counted(micro).sum() for micro in micro_batches)), device="cuda")
        torch.distributed.all_reduce(tokens, group=groups.data)
        return cls(coef=coef, tokens=float(tokens))

    def metrics(self, layers: int) -> Mapping[str, Metric]:
        """The mean over tokens and layers of experts, 1 where the load is even. Called on every rank."""
        total = torch.stack([torch.zeros((), device="cuda"), *self.parts]).sum()
        torch.distributed.all_reduce(total)  # ranks that hold other layers and those that see other tokens
        return {LOSS: Metric(float(total) / layers)}


@frozen(kw_only=True, eq=False)
class Share:
    """What one rank's routers count of one micro-batch."""

    counts: Tensor  # [t, 1] bool: which of this rank's tokens
    tokens: int  # on all ranks of the group together
    group: ProcessGroup  # ranks that share the micro-batch's tokens
    step: Balance

    def balanced(self, values: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """`values` as they are, whose backward pass adds this rank's part of the loss; from probabilities [t, experts]
        and the likeliest [t, k]. Called on every rank of the group.

        The loss is experts * sum_i (share of choices of i) * (mean probability of i) (Fedus et al. 2021, eq. 4).
        """
        load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mul(self.counts).sum(0).detach()
        torch.distributed.all_reduce(load, group=self.group)
        likely = (probabilities * self.counts).sum(0)
        # tokens / tokens of the step is the micro-batch's weight; 1 / tokens of it goes into each of the two means.
        part = (load @ likely) * (len(load) / chosen.shape[1] / max(self.tokens, 1) / self.step.tokens)
        self.step.parts.append(part.detach())
        added: Tensor = _Added.apply(values, self.step.coef * part)
        return added


class _Added(torch.autograd.Function):
    """The first argument; the second is added to the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)
