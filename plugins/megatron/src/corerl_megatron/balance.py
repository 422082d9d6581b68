"""The load-balancing loss for experts: each router adds its part of the gradient as tokens pass through it.

megatron-core's own counts padding and fillers as tokens, and multiplies its gradient by a number of tokens that differs
between versions. transformers' loss, which `corerl.backend.experts` computes, takes the tokens of all layers together:
a layer which prefers an expert makes up for one that avoids it. Here a router knows no other layer's load, as later
stages come later, so the loss is a mean over layers, each by itself. With one layer of experts both are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from corerl.backend import AUX_LOSS
from corerl.types import Metric


@frozen(kw_only=True, eq=False)
class Balance:
    """The balancing loss of one optimizer step: a mean over its tokens, so micro-batches are weighted by tokens."""

    coef: float  # of each part
    tokens: int  # number of tokens in the step, on all ranks
    topk: int
    parts: list[Tensor] = field(factory=list)  # each [], this rank's parts of the loss so far: 1 if the load is even

    def metrics(self, layers: int) -> Mapping[str, Metric]:
        """The loss, a mean over tokens and MoE layers; `topk` if the load is even. Called on every rank."""
        total = torch.stack([torch.zeros((), device="cuda"), *self.parts]).sum()
        torch.distributed.all_reduce(total)  # over ranks with other layers and ranks with other tokens
        return {AUX_LOSS: Metric(float(total) * self.topk / layers)}


@frozen(kw_only=True, eq=False)
class Share:
    """One rank's share of a micro-batch's balancing loss."""

    counts: Tensor  # [t, 1] bool: which of this rank's tokens count
    tokens: int  # number of counted tokens on all ranks of the group
    group: ProcessGroup  # ranks that share the micro-batch's tokens
    step: Balance

    def balanced(self, values: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """`values` unchanged, but their backward pass adds this rank's part of the loss; from probabilities [t,
        experts] and the chosen experts [t, k]. Called on every rank of the group.

        The loss is experts * sum_i (fraction of choices of i) * (mean probability of i) (Fedus et al. 2021, eq. 4).
        """
        load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mul(self.counts).sum(0).detach()
        torch.distributed.all_reduce(load, group=self.group)
        likely = (probabilities * self.counts).sum(0)
        # The micro-batch's weight is tokens / step.tokens, and each of the two means divides by tokens.
        part = (load @ likely) * (len(load) / chosen.shape[1] / max(self.tokens, 1) / self.step.tokens)
        self.step.parts.append(part.detach())
        added: Tensor = _Added.apply(values, self.step.coef * part)
        return added


class _Added(torch.autograd.Function):
    """Returns the first argument; its backward pass acts as if the second were added to the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)
