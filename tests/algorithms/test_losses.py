"""Metrics, bounds and tokens that do not count, by hand; `test_enumeration` has the gradients of the objectives."""

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from corerl.algorithms.losses import Loss, LossInputs, LossResult, TensorMetric, clipped, value, weighted_logprobs
from corerl.errors import ContractError
from corerl.types import Reduction
from tests.algorithms.ragged import random_samples, step_of

# token   p_new  p_old   ratio  advantage   ratio * A   clipped to [0.8, 1.3] * A   min
#   0      0.6    0.4     1.5       2          3.0              2.6                  2.6   clipped, no gradient
#   1      0.3    0.6     0.5      -1         -0.5             -0.8                 -0.8   clipped, no gradient
#   2      0.2    0.4     0.5       1          0.5              0.8                  0.5   not clipped: may recover
NEW = [0.6, 0.3, 0.2]
# token   value   old   return   error^2    clipped to old +- 1/2   its error^2    max
#   0       2      0      3         1             0.5                  6.25        6.25   clipped, no gradient
#   1       2      0      0         4             0.5                  0.25        4      too far, and may come back
#   2       1.25   1      1         0.0625        1.25                 0.0625      0.0625
VALUES = [2.0, 2.0, 1.25]
WEIGHTS, SLOPES = [0.5, 0.25, 0.25], [2.0, -1.0, 0.5]
COLUMNS = {
    "advantages": [2.0, -1.0, 1.0],
    "old_logprobs": [math.log(p) for p in (0.4, 0.6, 0.4)],
    "rollout_logprobs": [math.log(p) for p in (0.3, 0.6, 0.2)],
    "ref_logprobs": [math.log(p) for p in (0.3, 0.3, 0.4)],
    "values": [0.0, 0.0, 1.0],
    "returns": [3.0, 0.0, 1.0],
    "logprob_weights": SLOPES,
}
BOUNDS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "clipped": (clipped, {**BOUNDS, "entropy_coef": 0.1, "kl_coef": 0.2}),
    "value": (value, {}),
    "value, clipped": (value, {"value_clip": 0.5}),
    "weighted_logprobs": (weighted_logprobs, {}),
}


def three_tokens(*, around: float | None = None) -> LossInputs:
    """What any loss reads, between two tokens of weight zero that hold `around` where it is given."""

    def widen(numbers: list[float], idle: float | None = around) -> torch.Tensor:
        return torch.tensor(numbers if idle is None else [idle, *numbers, idle], dtype=torch.float64)

    return LossInputs(
        logprobs=widen([math.log(p) for p in NEW]).requires_grad_(),
        entropy=widen([1.0, 2.0, 3.0]).requires_grad_(),
        values=widen(VALUES).requires_grad_(),
        columns={
            "weights": widen(WEIGHTS, None if around is None else 0.0),
            **{name: widen(numbers) for name, numbers in COLUMNS.items()},
        },
    )


def gradients(result: LossResult, inputs: LossInputs) -> list[list[float]]:
    leaves = (inputs.logprobs, inputs.entropy, inputs.values)
    found = torch.autograd.grad(result.loss, leaves, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    return [each.tolist() for each in found]


def totals(result: LossResult) -> dict[str, tuple[float, float]]:
    return {name: (each.total.item(), each.weight.item()) for name, each in result.metrics.items()}


def mean(metric: TensorMetric) -> float:
    assert metric.reduction is Reduction.MEAN
    return (metric.total / metric.weight).item()


# ---- every loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [7.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", LOSSES)
def test_tokens_of_weight_zero_reach_no_loss_or_metric(name: str, poison: float) -> None:
    loss, params = LOSSES[name]
    given, among = three_tokens(), three_tokens(around=poison)
    alone, found = loss(given, **params), loss(among, **params)
    assert found.loss.item() == alone.loss.item() and totals(found) == totals(alone)
    assert gradients(found, among) == [[0.0, *each, 0.0] for each in gradients(alone, given)]


@pytest.mark.parametrize(
    ("name", "without", "message"),
    [
        ("clipped", "logprobs", r"'clipped' got no log-probs; request them in LossSpec\.outputs"),
        ("clipped", "entropy", "entropy_coef=0.1 but got no entropy"),
        ("clipped", "ref_logprobs", r"needs the column 'ref_logprobs' \[T\]; got: advantages, "),
        ("value", "output values", r"'value' got no values; request them in LossSpec\.outputs"),
        ("value, clipped", "values", r"'value' needs the column 'values' \[T\]; got: "),
        ("weighted_logprobs", "logprobs", "'weighted_logprobs' got no log-probs"),
        ("weighted_logprobs", "logprob_weights", r"needs the column 'logprob_weights' \[T\]; got: "),
    ],
)
def test_a_missing_column_or_output_is_named(name: str, without: str, message: str) -> None:
    loss, params = LOSSES[name]
    inputs = three_tokens()
    if without in inputs.columns:
        inputs = evolve(inputs, columns={name: each for name, each in inputs.columns.items() if name != without})
    else:
        inputs = evolve(inputs, **{without.removeprefix("output "): None})
    with pytest.raises(ContractError, match=message):
        loss(inputs, **params)


# ---- each ------------------------------------------------------------------------------------------------------------


def test_the_dual_clip_is_the_formula_token_by_token() -> None:
    samples = random_samples(4)
    step = step_of(clipped, samples, dual_clip=1.4)
    loss, at_bound = 0.0, 0
    for each, gradient in zip(samples, step.gradients, strict=True):
        slopes = []
        for ratio, advantage in zip(each.ratios, each.advantages, strict=True):
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            dual = advantage < 0 and gain < 1.4 * advantage
            at_bound += dual
            loss -= each.weight * (1.4 * advantage if dual else gain)
            free = not dual and gain == ratio * advantage
            slopes.append(-each.weight * ratio * advantage if free else 0.0)
        assert gradient == pytest.approx(slopes, abs=1e-15)
    assert step.loss == pytest.approx(loss)
    assert step.metrics["dual_clip_fraction"].total == at_bound > 10
    assert "dual_clip_fraction" not in step_of(clipped, samples).metrics


def test_metrics_of_three_tokens_worked_by_hand() -> None:
    metrics = clipped(three_tokens(), **BOUNDS, entropy_coef=0.1, kl_coef=0.2, kl_estimator="k1").metrics
    assert metrics["policy_loss"].total.item() == pytest.approx(-1.225)
    assert metrics["loss"].total.item() == pytest.approx(-1.225 - 0.175 + 0.2 * (0.5 * 1.5 - 0.25 * 0.5) * math.log(2))
    assert metrics["loss"].reduction is Reduction.LOSS
    assert mean(metrics["entropy"]) == pytest.approx(2.0)
    assert mean(metrics["kl"]) == pytest.approx((1.5 - 0.5) * math.log(2) / 3)  # ratio * log(p_new / p_ref)
    assert mean(metrics["ratio"]) == pytest.approx((1.5 + 0.5 + 0.5) / 3)
    assert mean(metrics["clip_fraction"]) == pytest.approx(2 / 3)
    assert mean(metrics["approx_kl"]) == pytest.approx(
        ((0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2))) / 3  # ratio - 1 - log ratio
    )
    assert mean(metrics["logprob_diff"]) == pytest.approx(2 * math.log(2) / 3)
    assert metrics["logprob_diff_max"].total.item() == pytest.approx(math.log(2))
    assert metrics["logprob_diff_max"].reduction is Reduction.MAX
    assert not any(metric.total.requires_grad for metric in metrics.values())


def test_the_critics_metrics_of_three_tokens_worked_by_hand() -> None:
    result = value(three_tokens(), value_clip=0.5)
    metrics = dict(result.metrics)
    loss = metrics.pop("loss")
    assert (loss.total.item(), loss.reduction) == (result.loss.item(), Reduction.LOSS)
    assert {name: mean(metric) for name, metric in metrics.items()} == pytest.approx(
        {"value": 5.25 / 3, "return": 4 / 3, "value_error": 3.25 / 3, "value_clip_fraction": 1 / 3}
    )
    assert not any(metric.total.requires_grad for metric in result.metrics.values())
    assert mean(value(three_tokens()).metrics["value_clip_fraction"]) == 0.0


@pytest.mark.parametrize("value_clip", [0.0, 0.3])
def test_the_critics_loss_is_the_formula_token_by_token(value_clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 300, generator=generator, dtype=torch.float64)
    weights = torch.rand(300, generator=generator, dtype=torch.float64)
    loss, clip_decides = 0.0, 0
    slopes = []
    for w, v, o, r in zip(weights.tolist(), values.tolist(), old.tolist(), returns.tolist(), strict=True):
        free, bounded = (v - r) ** 2, (min(max(v, o - value_clip), o + value_clip) - r) ** 2
        decides = value_clip > 0 and bounded > free
        loss += w * 0.5 * (bounded if decides else free)
        slopes.append(0.0 if decides else w * (v - r))
        clip_decides += decides
    inputs = LossInputs(values=values.requires_grad_(), columns={"weights": weights, "returns": returns, "values": old})
    result = value(inputs, value_clip=value_clip)
    assert result.loss.item() == pytest.approx(loss)
    (gradient,) = torch.autograd.grad(result.loss, inputs.values)  # type: ignore[arg-type]
    assert gradient.tolist() == pytest.approx(slopes)
    assert mean(result.metrics["value_clip_fraction"]) == pytest.approx(clip_decides / 300)


def test_weighted_logprobs_of_three_tokens_worked_by_hand() -> None:
    inputs = three_tokens()
    result = weighted_logprobs(inputs)
    wanted = sum(w * s * math.log(p) for w, s, p in zip(WEIGHTS, SLOPES, NEW, strict=True))
    assert result.loss.item() == pytest.approx(wanted)
    assert inputs.logprobs is not None
    (gradient,) = torch.autograd.grad(result.loss, inputs.logprobs)
    assert gradient.tolist() == [w * s for w, s in zip(WEIGHTS, SLOPES, strict=True)]
    ((name, metric),) = result.metrics.items()
    assert (name, metric.total.item(), metric.weight.item(), metric.reduction) == (
        "loss",
        result.loss.item(),
        3,
        Reduction.LOSS,
    )
    assert not metric.total.requires_grad


def test_losses_of_one_logprob_for_each_token_refuse_several() -> None:
    inputs = three_tokens()
    assert inputs.logprobs is not None
    several = evolve(inputs, logprobs=inputs.logprobs[:, None].expand(3, 3))  # 3 x 3 would fit the columns of 3
    with pytest.raises(ContractError, match="'clipped' takes one log-prob for each token, but .* has 3 tokens at each"):
        clipped(several)
    with pytest.raises(ContractError, match=r"column 'logprob_weights' \[3\] for log-probs \[3, 3\]"):
        weighted_logprobs(several)
