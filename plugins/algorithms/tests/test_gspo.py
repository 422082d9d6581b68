"""Gradients of longer samples are compared with the paper's formulas in plain Python."""

import math
from typing import Any

import pytest
import torch

from corerl.algorithms import LossInputs
from corerl.errors import ContractError
from corerl_algorithms.gspo import gspo, gspo_token
from tests.algorithms.ragged import Sample, random_samples, step_of

BOUNDS = {"clip_low": 0.1, "clip_high": 0.2}


def by_formula(sample: Sample, *, token: bool) -> tuple[float, list[float]]:
    """Loss and gradient of one sample by eq. 5 and 7, or with `token` by eq. 13 and 14."""
    s = math.prod(sample.ratios) ** (1 / len(sample.ratios))
    terms, slopes = [], []
    for advantage in sample.advantages:
        free, bounded = s * advantage, min(max(s, 0.9), 1.2) * advantage
        terms.append(-sample.weight * min(free, bounded))
        slopes.append(-sample.weight * free if free <= bounded else 0.0)  # d term / d log s
    spread = [sum(slopes) / len(slopes)] * len(slopes)  # d log s / d log p is 1 / |y|
    return sum(terms), slopes if token else spread


@pytest.mark.parametrize(("loss", "token"), [(gspo, False), (gspo_token, True)])
def test_loss_and_gradient_are_the_papers_for_each_sample(loss: Any, token: bool) -> None:
    samples = random_samples(0)
    step = step_of(loss, samples, **BOUNDS)
    expected = [by_formula(each, token=token) for each in samples]
    assert step.loss == pytest.approx(sum(value for value, _ in expected))
    assert step.gradients == [pytest.approx(gradient, abs=1e-15) for _, gradient in expected]
    assert 0.1 < step.metrics["clip_fraction"].value < 0.9
    means = [math.prod(each.ratios) ** (1 / len(each.ratios)) for each in samples for _ in each.ratios]
    assert step.metrics["sequence_ratio"].value == pytest.approx(sum(means) / len(means))
    papers = step_of(loss, samples, clip_low=3e-4, clip_high=4e-4)  # section 5.1
    assert step_of(loss, samples).gradients == papers.gradients


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_inputs_that_do_not_tell_where_samples_begin_are_refused(loss: Any) -> None:
    zero = torch.zeros(2)
    inputs = LossInputs(logprobs=zero, columns={"weights": torch.ones(2), "advantages": zero, "old_logprobs": zero})
    with pytest.raises(ContractError, match="needs to know where each sample begins; pass LossInputs.bounds"):
        loss(inputs)
