"""Two groups worked out by hand; gradients are compared with the paper's formula in plain Python."""

import math

import pytest

from corerl.algorithms.cispo import CISPO, SPEC, Options, cispo
from corerl.plugin.spec import ACTOR
from tests.algorithms.ragged import Sample, random_samples, step_of

# sample   ratios       weights, at most 5    A
#   0      8, 1, 2      5, 1, 2               2
#   1      1/2, 16      1/2, 5               -1
#   2      1/4, 1       1/4, 1                0.5
#   3      1/16         1/16                 -0.5
# Samples 0 and 1 are one group, 2 and 3 another. Each of the 8 tokens has a weight of 1/8, as with "token-mean".
TWO_GROUPS = [
    Sample(ratios=[8, 1, 2], advantages=[2] * 3, weight=1 / 8, logprobs=[-1, -2, -4], prompt=2),
    Sample(ratios=[0.5, 16], advantages=[-1] * 2, weight=1 / 8, logprobs=[-2, -1], padding=3),
    Sample(ratios=[0.25, 1], advantages=[0.5] * 2, weight=1 / 8, logprobs=[-4, -2], prompt=0),
    Sample(ratios=[1 / 16], advantages=[-0.5], weight=1 / 8, logprobs=[-8]),
]


def test_two_groups_worked_by_hand() -> None:
    step = step_of(cispo, TWO_GROUPS)
    assert step.loss == pytest.approx(-(2 * (-5 - 2 - 8) - (-1 - 5) + 0.5 * (-1 - 2) - 0.5 * -0.5) / 8)
    # -1/8 weight A: at its bound a weight pushes on, where PPO's clip would have dropped the token
    assert step.gradients == [
        pytest.approx([-1.25, -0.25, -0.5]),
        pytest.approx([0.0625, 0.625]),
        pytest.approx([-0.015625, -0.0625]),
        pytest.approx([0.00390625]),
    ]
    assert step.metrics["clip_fraction"].value == 2 / 8
    assert step.metrics["ratio"].value == pytest.approx((11 + 16.5 + 1.25 + 1 / 16) / 8)  # before its bound


def test_with_a_lower_bound_a_token_that_has_become_rare_keeps_that_weight() -> None:
    step = step_of(cispo, TWO_GROUPS, clip_low=0.6, clip_high=1.5)
    weights = [[2.5, 1, 2], [0.5, 2.5], [0.4, 1], [0.4]]
    for gradient, each, expected in zip(step.gradients, TWO_GROUPS, weights, strict=True):
        assert gradient == pytest.approx([-w * each.advantages[0] / 8 for w in expected])
    assert step.metrics["clip_fraction"].value == 4 / 8


def test_loss_and_gradient_are_those_of_the_paper_token_by_token() -> None:
    samples = random_samples(3)
    step = step_of(cispo, samples, clip_low=0.3, clip_high=0.5)
    loss, clipped, count = 0.0, 0, 0
    for each, gradient in zip(samples, step.gradients, strict=True):
        bounded = [min(max(ratio, 0.7), 1.5) for ratio in each.ratios]
        slopes = [-each.weight * w * a for w, a in zip(bounded, each.advantages, strict=True)]
        loss += sum(slope * p for slope, p in zip(slopes, each.logprobs, strict=True))
        clipped += sum(not math.isclose(w, ratio) for w, ratio in zip(bounded, each.ratios, strict=True))
        count += len(slopes)
        assert gradient == pytest.approx(slopes)
    assert step.loss == pytest.approx(loss)
    assert step.metrics["clip_fraction"].value == clipped / count
    assert 0.1 < clipped / count < 0.9


def test_a_run_bounds_weights_from_above_only_and_its_loss_is_the_one_that_the_spec_names() -> None:
    assert SPEC.implementation == f"{CISPO.__module__}:{CISPO.__name__}"
    loss = CISPO(Options()).objectives()[ACTOR].loss
    assert (loss.name, loss.params) == ("corerl.algorithms.cispo:cispo", {"clip_low": 1.0, "clip_high": 4.0})
    by_run, by_default = (step_of(cispo, TWO_GROUPS, **params) for params in (loss.params, {}))
    assert by_run.loss == by_default.loss
