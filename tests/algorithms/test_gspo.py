"""Two groups worked out by hand; gradients are compared with the paper's formulas in plain Python."""

import itertools
import math
import random

import pytest
import torch

from corerl.algorithms.grpo import GRPO
from corerl.algorithms.gspo import GSPO, SPEC, TOKEN_SPEC, GSPOToken, Options, gspo, gspo_token
from corerl.algorithms.losses import Loss, LossInputs
from corerl.config.schema import AlgorithmConfig
from corerl.errors import ContractError
from corerl.plugin.spec import ACTOR, AlgorithmSpec
from corerl.types import merge_metrics
from tests.algorithms.ragged import Sample, random_samples, step_of

BOUNDS = {"clip_low": 0.1, "clip_high": 0.2}
# sample   ratios      s      A     s A    clip(s, 0.9, 1.2) A    min
#   0      4, 1, 2     2      2      4             2.4            2.4    clipped, no gradient
#   1      1/2, 2      1     -1     -1            -1             -1      its ratios alone would be clipped
#   2      1/4, 1      1/2   0.5   0.25            0.45           0.25   may recover
#   3      1/16        1/16  -1    -1/16          -0.9           -0.9    clipped, no gradient
# Samples 0 and 1 are one group, 2 and 3 another. Each has a weight of 1/4, as with "sequence-mean".
TWO_GROUPS = [
    Sample(ratios=[4, 1, 2], advantages=[2] * 3, weight=1 / 12, prompt=2),
    Sample(ratios=[0.5, 2], advantages=[-1] * 2, weight=1 / 8, padding=3),
    Sample(ratios=[0.25, 1], advantages=[0.5] * 2, weight=1 / 8, prompt=0),
    Sample(ratios=[1 / 16], advantages=[-1], weight=1 / 4),
]


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_two_groups_worked_by_hand(loss: Loss) -> None:
    step = step_of(loss, TWO_GROUPS, **BOUNDS)
    assert step.loss == pytest.approx(-(2.4 - 1 + 0.25 - 0.9) / 4)
    # -1/4 s A / |y| at each token
    assert step.gradients == [[0, 0, 0], pytest.approx([0.125] * 2), pytest.approx([-0.03125] * 2), [0]]
    assert step.metrics["clip_fraction"].value == (3 + 1) / 8
    assert step.metrics["sequence_ratio"].value == pytest.approx((3 * 2 + 2 * 1 + 2 / 2 + 1 / 16) / 8)
    assert step.metrics["ratio"].value == pytest.approx((7 + 2.5 + 1.25 + 1 / 16) / 8)


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
def test_loss_and_gradient_are_those_of_the_paper_sample_by_sample(loss: Loss, token: bool) -> None:
    samples = random_samples(0)
    step = step_of(loss, samples, **BOUNDS)
    expected = [by_formula(each, token=token) for each in samples]
    assert step.loss == pytest.approx(sum(value for value, _ in expected))
    assert step.gradients == [pytest.approx(gradient, abs=1e-15) for _, gradient in expected]
    assert 0.1 < step.metrics["clip_fraction"].value < 0.9


def test_both_have_equal_gradients_if_the_advantages_of_a_sample_are_equal() -> None:
    samples = random_samples(1, alike=True)
    whole, token = (step_of(loss, samples, **BOUNDS) for loss in (gspo, gspo_token))
    assert token.loss == pytest.approx(whole.loss, rel=1e-12)
    assert token.gradients == [pytest.approx(each, rel=1e-12, abs=1e-18) for each in whole.gradients]


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_neither_the_order_of_samples_nor_their_micro_batches_matter(loss: Loss) -> None:
    samples = random_samples(2)
    together = step_of(loss, samples, **BOUNDS)
    order = random.Random(0).sample(range(40), 40)
    parts = [order[:1], order[1:20], order[20:]]
    steps = [step_of(loss, [samples[i] for i in part], **BOUNDS) for part in parts]
    assert sum(step.loss for step in steps) == pytest.approx(together.loss, rel=1e-12)
    gradients = itertools.chain(*(step.gradients for step in steps))
    for i, gradient in zip(order, gradients, strict=True):
        assert gradient == pytest.approx(together.gradients[i], rel=1e-12, abs=1e-18)
    merged = merge_metrics(step.metrics for step in steps)
    assert {name: each.value for name, each in merged.items()} == pytest.approx(
        {name: each.value for name, each in together.metrics.items()}
    )


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_inputs_that_do_not_tell_where_samples_begin_are_refused(loss: Loss) -> None:
    zero = torch.zeros(2)
    inputs = LossInputs(logprobs=zero, columns={"weights": torch.ones(2), "advantages": zero, "old_logprobs": zero})
    with pytest.raises(ContractError, match="needs to know where each sample begins; pass LossInputs.bounds"):
        loss(inputs)


@pytest.mark.parametrize(("spec", "algorithm", "loss"), [(SPEC, GSPO, "gspo"), (TOKEN_SPEC, GSPOToken, "gspo_token")])
def test_a_run_weights_samples_alike_and_clips_by_the_papers_bounds(
    spec: AlgorithmSpec, algorithm: type[GRPO], loss: str
) -> None:
    assert spec.implementation == f"{algorithm.__module__}:{algorithm.__name__}"
    assert AlgorithmConfig().settled(spec.defaults, max_tokens=8).aggregation == "sequence-mean"
    found = algorithm(Options()).objectives()[ACTOR].loss
    assert (found.name, found.params) == (f"corerl.algorithms.gspo:{loss}", {"clip_low": 3e-4, "clip_high": 4e-4})
