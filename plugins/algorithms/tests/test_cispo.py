"""Gradients of longer samples are compared with the paper's formula in plain Python."""

import math

import pytest

from corerl_algorithms.cispo import cispo
from tests.algorithms.ragged import random_samples, step_of


@pytest.mark.parametrize(("bounds", "low", "high"), [({"clip_low": 0.3, "clip_high": 0.5}, 0.7, 1.5), ({}, 0.0, 5.0)])
def test_loss_and_gradient_are_those_of_the_paper(bounds: dict[str, float], low: float, high: float) -> None:
    samples = random_samples(3)
    step = step_of(cispo, samples, **bounds)
    loss, clipped, ratios = 0.0, 0, [ratio for each in samples for ratio in each.ratios]
    for each, gradient in zip(samples, step.gradients, strict=True):
        bounded = [min(max(ratio, low), high) for ratio in each.ratios]
        slopes = [-each.weight * w * a for w, a in zip(bounded, each.advantages, strict=True)]
        loss += sum(slope * p for slope, p in zip(slopes, each.logprobs, strict=True))
        clipped += sum(not math.isclose(w, ratio) for w, ratio in zip(bounded, each.ratios, strict=True))
        assert gradient == pytest.approx(slopes)
    assert step.loss == pytest.approx(loss)
    assert step.metrics["clip_fraction"].value == clipped / len(ratios)
    assert step.metrics["ratio"].value == pytest.approx(sum(ratios) / len(ratios))  # before its bound
    assert not bounds or 0.1 < clipped / len(ratios) < 0.9
