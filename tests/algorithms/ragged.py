"""Samples for tests of a policy's loss: a few numbers for each loss token, packed as a rank would."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import Factory, frozen

from corerl.algorithms.losses import Loss, LossInputs
from corerl.types import Metric

IDLE = math.nan  # held by tokens that do not count


@frozen(kw_only=True)
class Sample:
    """The loss tokens of a sample, each list [n], behind a prompt and before padding."""

    ratios: Sequence[float]  # new probability / old one
    advantages: Sequence[float]
    weight: float  # of each loss token
    logprobs: Sequence[float] = Factory(lambda self: [-1.0] * len(self.ratios), takes_self=True)
    prompt: int = 1
    padding: int = 0


@frozen
class Step:
    """What a loss says of some samples."""

    loss: float
    gradients: list[list[float]]  # of each sample, at the log-probs of its loss tokens
    metrics: Mapping[str, Metric]


def step_of(loss: Loss, samples: Sequence[Sample], **params: Any) -> Step:
    """The loss of samples that are packed into one micro-batch, in float64."""

    def column(idle: float, of: Any) -> torch.Tensor:
        rows = [[idle] * each.prompt + list(of(each)) + [idle] * each.padding for each in samples]
        return torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64)

    lengths = [each.prompt + len(each.ratios) + each.padding for each in samples]
    logprobs = column(IDLE, lambda each: each.logprobs).requires_grad_()
    old = column(IDLE, lambda each: [p - math.log(r) for p, r in zip(each.logprobs, each.ratios, strict=True)])
    inputs = LossInputs(
        logprobs=logprobs,
        columns={
            "weights": column(0.0, lambda each: [each.weight] * len(each.ratios)),
            "advantages": column(IDLE, lambda each: each.advantages),
            "old_logprobs": old,
            "rollout_logprobs": old,
        },
        bounds=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
    )
    result = loss(inputs, **params)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    rows = [row.tolist() for row in gradient.split(lengths)]
    for row, each in zip(rows, samples, strict=True):
        assert not any(row[: each.prompt]) and not any(row[each.prompt + len(each.ratios) :])
    return Step(
        result.loss.item(),
        [row[each.prompt : each.prompt + len(each.ratios)] for row, each in zip(rows, samples, strict=True)],
        {n: Metric(m.total.item(), m.weight.item(), m.reduction) for n, m in result.metrics.items()},
    )


def random_samples(seed: int) -> list[Sample]:
    """40 samples of 1 to 12 loss tokens, with ratios of about 0.4 to 2.2 and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> list[float]:
        numbers: list[float] = torch.randn(count, generator=generator, dtype=torch.float64).tolist()
        return numbers

    return [
        Sample(
            ratios=[math.exp(0.4 * z) for z in normal(length)],
            advantages=normal(length),
            weight=1 / (40 * length),
            logprobs=[-1.5 + 0.5 * z for z in normal(length)],
            prompt=length % 3,
            padding=length % 2,
        )
        for length in torch.randint(1, 13, (40,), generator=generator).tolist()
    ]
