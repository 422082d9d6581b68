"""Add up the metrics of many micro-batches on the device, and move them to the host in one transfer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corerl.algorithms.losses import TensorMetric
from corerl.types import Metric, Reduction


class MetricSum:
    """This rank's part of every metric of one optimizer step. `add` never waits for the device; `finish` does, once."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._reductions: dict[str, Reduction] = {}

    def add(self, metrics: Mapping[str, TensorMetric]) -> None:
        for name, metric in metrics.items():
            # float64: a sum over a million tokens of similar weight loses none of them to rounding.
            total, weight = metric.total.detach().double(), metric.weight.detach().double()
            if name not in self._totals:
                self._totals[name], self._weights[name] = total, weight
                self._reductions[name] = metric.reduction
                continue
            if metric.reduction is not self._reductions[name]:
                raise ValueError(
                    f"metric {name!r} has the reduction {metric.reduction}, but had {self._reductions[name]} in an "
                    "earlier micro-batch; the loss must return it with the same reduction each time"
                )
            match metric.reduction:
                case Reduction.MAX:
                    self._totals[name] = torch.maximum(self._totals[name], total)
                case Reduction.MIN:
                    self._totals[name] = torch.minimum(self._totals[name], total)
                case _:
                    self._totals[name] = self._totals[name] + total
                    self._weights[name] = self._weights[name] + weight

    def finish(self) -> dict[str, Metric]:
        if not self._totals:
            return {}
        names = list(self._totals)
        numbers = torch.stack([self._totals[n] for n in names] + [self._weights[n] for n in names]).tolist()
        totals, weights = numbers[: len(names)], numbers[len(names) :]
        return {n: Metric(t, w, self._reductions[n]) for n, t, w in zip(names, totals, weights, strict=True)}
