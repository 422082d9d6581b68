"""The three tokens are worked out by hand; gradients are compared with their closed form."""

import math
from typing import Any

import pytest
import torch

from corerl.algorithms.losses import LossInputs, LossResult, TensorMetric, clipped, mismatch, value, weighted_logprobs
from corerl.errors import ContractError
from corerl.types import Reduction
from tests.algorithms.ragged import Sample, random_samples, step_of

# token   p_new  p_old   ratio  advantage   ratio * A   clipped to [0.8, 1.3] * A   min
#   0      0.6    0.4     1.5       2          3.0              2.6                  2.6   clipped, no gradient
#   1      0.3    0.6     0.5      -1         -0.5             -0.8                 -0.8   clipped, no gradient
#   2      0.2    0.4     0.5       1          0.5              0.8                  0.5   not clipped: may recover
NEW, OLD, ROLLOUT, REFERENCE = [0.6, 0.3, 0.2], [0.4, 0.6, 0.4], [0.3, 0.6, 0.2], [0.3, 0.3, 0.4]
ADVANTAGES = [2.0, -1.0, 1.0]
WEIGHTS = [0.5, 0.25, 0.25]
ENTROPY = [1.0, 2.0, 3.0]
BOUNDS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}


def logs(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def three_tokens() -> LossInputs:
    return LossInputs(
        logprobs=logs(NEW).requires_grad_(),
        entropy=torch.tensor(ENTROPY, dtype=torch.float64, requires_grad=True),
        columns={
            "weights": torch.tensor(WEIGHTS, dtype=torch.float64),
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
            "old_logprobs": logs(OLD),
            "rollout_logprobs": logs(ROLLOUT),
            "ref_logprobs": logs(REFERENCE),
        },
    )


def with_idle_tokens(inputs: LossInputs, *, poison: float) -> LossInputs:
    """The same tokens between others at weight zero, which hold `poison` everywhere else."""

    def widen(values: torch.Tensor, idle: float) -> torch.Tensor:
        around = torch.full((1,), idle, dtype=values.dtype)
        return torch.cat([around, values.detach(), around])

    assert inputs.entropy is not None
    return LossInputs(
        logprobs=widen(inputs.logprobs, poison).requires_grad_(),
        entropy=widen(inputs.entropy, poison).requires_grad_(),
        columns={name: widen(c, 0.0 if name == "weights" else poison) for name, c in inputs.columns.items()},
    )


def gradients(inputs: LossInputs, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert inputs.entropy is not None
    result = clipped(inputs, **params)
    at_logprobs, at_entropy = torch.autograd.grad(
        result.loss, (inputs.logprobs, inputs.entropy), allow_unused=True, materialize_grads=True
    )
    return at_logprobs, at_entropy


def mean(metric: TensorMetric) -> float:
    assert metric.reduction is Reduction.MEAN
    return (metric.total / metric.weight).item()


def test_the_clipped_objective_of_three_tokens_worked_by_hand() -> None:
    loss = clipped(three_tokens(), **BOUNDS).loss
    assert loss.item() == pytest.approx(-(0.5 * 2.6 + 0.25 * -0.8 + 0.25 * 0.5))


def test_the_gradient_is_weight_times_ratio_times_advantage_where_the_clip_does_not_decide() -> None:
    at_logprobs, _ = gradients(three_tokens(), **BOUNDS)
    assert at_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.25 * 0.5 * 1.0])


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    inputs = three_tokens()
    inputs = LossInputs(
        logprobs=inputs.logprobs, entropy=inputs.entropy, columns={**inputs.columns, "old_logprobs": logs(NEW)}
    )
    at_logprobs, _ = gradients(inputs)
    assert at_logprobs.tolist() == pytest.approx([-w * a for w, a in zip(WEIGHTS, ADVANTAGES, strict=True)])


def test_with_a_dual_clip_a_token_that_has_become_much_likelier_does_not_push_without_bound() -> None:
    # ratio     A     min(r A, clip(r, 0.8, 1.2) A)    with a dual clip of 3
    #   8      -2             -16                        -6      no gradient
    #   2      -2              -4                        -4
    #  1/2     -2              -1.6                      -1.6    clipped as ever, no gradient
    #   8       2               2.4                       2.4    clipped as ever, no gradient
    sample = Sample(ratios=[8, 2, 0.5, 8], advantages=[-2, -2, -2, 2], weight=0.25)
    plain, dual = step_of(clipped, [sample]), step_of(clipped, [sample], dual_clip=3.0)
    assert plain.loss == pytest.approx(0.25 * (16 + 4 + 1.6 - 2.4))
    assert plain.gradients == [pytest.approx([4, 1, 0, 0])]
    assert dual.loss == pytest.approx(0.25 * (6 + 4 + 1.6 - 2.4))
    assert dual.gradients == [pytest.approx([0, 1, 0, 0])]
    assert (dual.metrics["clip_fraction"].value, dual.metrics["dual_clip_fraction"].value) == (0.5, 0.25)
    assert "dual_clip_fraction" not in plain.metrics


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


def test_the_entropy_bonus_lowers_the_loss_by_the_weighted_entropy() -> None:
    plain, bonus = clipped(three_tokens(), **BOUNDS), clipped(three_tokens(), **BOUNDS, entropy_coef=0.1)
    assert (plain.loss - bonus.loss).item() == pytest.approx(0.1 * (0.5 * 1 + 0.25 * 2 + 0.25 * 3))
    _, at_entropy = gradients(three_tokens(), **BOUNDS, entropy_coef=0.1)
    assert at_entropy.tolist() == pytest.approx([-0.1 * w for w in WEIGHTS])


TOWARDS = [1.5 * math.log(2), 0.0, -0.5 * math.log(2)]  # the reference: ratio * log(p_new / p_ref)


@pytest.mark.parametrize(
    ("name", "values", "slopes"),  # of each token, with q = p_ref / p_new = 1/2, 1, 2
    [
        ("k1", [1.5 * math.log(2), 0.0, -0.5 * math.log(2)], TOWARDS),
        ("k2", [1.5 * math.log(2) ** 2 / 2, 0.0, 0.5 * math.log(2) ** 2 / 2], TOWARDS),
        ("k3", [1.5 * (0.5 - 1 + math.log(2)), 0.0, 0.5 * (2 - 1 - math.log(2))], TOWARDS),
        ("k3-differentiated", [0.5 - 1 + math.log(2), 0.0, 2 - 1 - math.log(2)], [1 - 0.5, 0.0, 1 - 2.0]),
    ],
)
def test_the_kl_penalty_raises_the_loss_by_the_weighted_estimate(
    name: str, values: list[float], slopes: list[float]
) -> None:
    plain = clipped(three_tokens(), **BOUNDS)
    penalised = clipped(three_tokens(), **BOUNDS, kl_coef=0.2, kl_estimator=name)
    expected = 0.2 * sum(w * v for w, v in zip(WEIGHTS, values, strict=True))
    assert (penalised.loss - plain.loss).item() == pytest.approx(expected)
    assert mean(penalised.metrics["kl"]) == pytest.approx(sum(values) / 3)

    without, _ = gradients(three_tokens(), **BOUNDS)
    with_kl, _ = gradients(three_tokens(), **BOUNDS, kl_coef=0.2, kl_estimator=name)
    assert (with_kl - without).tolist() == pytest.approx(
        [0.2 * w * s for w, s in zip(WEIGHTS, slopes, strict=True)], abs=1e-12
    )


def test_metrics_of_three_tokens_worked_by_hand() -> None:
    metrics = clipped(three_tokens(), **BOUNDS, entropy_coef=0.1).metrics
    assert metrics["policy_loss"].total.item() == pytest.approx(-1.225)
    assert metrics["loss"].total.item() == pytest.approx(-1.225 - 0.175)
    assert metrics["loss"].reduction is Reduction.LOSS
    assert mean(metrics["entropy"]) == pytest.approx(2.0)
    assert mean(metrics["ratio"]) == pytest.approx((1.5 + 0.5 + 0.5) / 3)
    assert mean(metrics["clip_fraction"]) == pytest.approx(2 / 3)
    assert mean(metrics["approx_kl"]) == pytest.approx(
        ((0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2))) / 3  # ratio - 1 - log ratio
    )
    assert mean(metrics["logprob_diff"]) == pytest.approx(2 * math.log(2) / 3)
    assert metrics["logprob_diff_max"].total.item() == pytest.approx(math.log(2))
    assert metrics["logprob_diff_max"].reduction is Reduction.MAX
    assert not any(metric.total.requires_grad for metric in metrics.values())


def test_the_mismatch_of_three_tokens_worked_by_hand_and_a_fourth_that_does_not_count() -> None:
    trainer, engine = torch.tensor([-1.0, -2.0, -3.05, -math.inf]), torch.tensor([-2.5, -2.0, -3.0, math.nan])
    found = mismatch(trainer, engine, torch.tensor([True, True, True, False]))
    assert {name: mean(metric) for name, metric in found.items() if name != "logprob_diff_max"} == {
        "logprob_diff": pytest.approx((1.5 + 0.05) / 3),
        "logprob_kl": pytest.approx((math.exp(1.5) - 1 - 1.5 + math.exp(-0.05) - 1 + 0.05) / 3, rel=1e-5),
        "logprob_diff_above_0.1": pytest.approx(1 / 3),
        "logprob_diff_above_1": pytest.approx(1 / 3),
    }
    assert found["logprob_diff_max"].total.item() == 1.5


def test_a_log_prob_that_is_no_number_counts_as_far_apart() -> None:
    found = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, math.nan]), torch.tensor([True, True]))
    assert [mean(found[f"logprob_diff_above_{limit}"]) for limit in ("0.1", "1")] == [0.5, 0.5]


@pytest.mark.parametrize("poison", [7.0, math.inf, -math.inf, math.nan])
def test_tokens_of_weight_zero_reach_neither_loss_nor_gradient_nor_metric(poison: float) -> None:
    params = {**BOUNDS, "entropy_coef": 0.1, "kl_coef": 0.2}
    alone = clipped(three_tokens(), **params)
    among = clipped(with_idle_tokens(three_tokens(), poison=poison), **params)
    assert among.loss.item() == alone.loss.item()
    assert_equal_metrics(among, alone)
    for wide, narrow in zip(
        gradients(with_idle_tokens(three_tokens(), poison=poison), **params),
        gradients(three_tokens(), **params),
        strict=True,
    ):
        assert wide.tolist() == [0.0, *narrow.tolist(), 0.0]


def assert_equal_metrics(left: LossResult, right: LossResult) -> None:
    assert left.metrics.keys() == right.metrics.keys()
    for name, metric in left.metrics.items():
        assert (metric.total.item(), metric.weight.item()) == (
            right.metrics[name].total.item(),
            right.metrics[name].weight.item(),
        ), name


def test_a_filler_micro_batch_gives_a_loss_of_zero_that_has_a_gradient_of_zero() -> None:
    inputs = three_tokens()
    filler = LossInputs(
        logprobs=inputs.logprobs,
        entropy=inputs.entropy,
        columns={**inputs.columns, "weights": torch.zeros(3, dtype=torch.float64)},
    )
    result = clipped(filler, entropy_coef=0.1)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert {metric.total.item() for metric in result.metrics.values()} == {0.0}
    assert {metric.weight.item() for metric in result.metrics.values()} == {0}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_the_old_policy_thought_impossible_does_not_make_the_step_infinite(advantage: float) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0], requires_grad=True),
        columns={
            "weights": torch.ones(1),
            "advantages": torch.tensor([advantage]),
            "old_logprobs": torch.tensor([-91.0]),
            "rollout_logprobs": torch.tensor([-91.0]),
        },
    )
    loss = clipped(inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize(("new", "before", "log_ratio"), [(-91.0, -1.0, -20.0), (-1.0, -91.0, 20.0)])
def test_log_probs_that_are_far_apart_count_in_divergences_with_a_log_ratio_of_20(
    new: float, before: float, log_ratio: float
) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([new], dtype=torch.float64),
        columns={
            "weights": torch.ones(1),
            "advantages": torch.ones(1),
            "old_logprobs": torch.tensor([before]),
            "rollout_logprobs": torch.tensor([before]),
        },
    )
    metrics = clipped(inputs).metrics
    k3 = math.exp(log_ratio) - 1 - log_ratio
    expected = {"ratio": math.exp(log_ratio), "approx_kl": k3, "logprob_kl": k3, "logprob_diff": 90.0}
    assert {name: mean(metrics[name]) for name in expected} == pytest.approx(expected)


def test_a_missing_column_or_output_is_named() -> None:
    inputs = three_tokens()
    with pytest.raises(ContractError, match=r"got no log-probs; request them in LossSpec\.outputs"):
        clipped(LossInputs(values=inputs.logprobs, columns=inputs.columns))
    with pytest.raises(ContractError, match="entropy_coef=0.1 but got no entropy"):
        clipped(LossInputs(logprobs=inputs.logprobs, columns=inputs.columns), entropy_coef=0.1)
    columns = {name: column for name, column in inputs.columns.items() if name != "ref_logprobs"}
    with pytest.raises(ContractError, match=r"needs the column 'ref_logprobs' \[T\]; got: advantages, old_logprobs"):
        clipped(LossInputs(logprobs=inputs.logprobs, columns=columns), kl_coef=0.1)


# token   value   old   return   error^2    clipped to old +- 1/2   its error^2    max
#   0       2      0      3         1             0.5                  6.25        6.25   clipped, no gradient
#   1       2      0      0         4             0.5                  0.25        4      too far, and may come back
#   2       1.25   1      1         0.0625        1.25                 0.0625      0.0625
VALUES, OLD_VALUES, RETURNS = [2.0, 2.0, 1.25], [0.0, 0.0, 1.0], [3.0, 0.0, 1.0]


def three_values(*, around: float | None = None) -> LossInputs:
    """The three tokens, between two of weight zero that hold `around` where it is given."""

    def widen(numbers: list[float], idle: float | None = around) -> torch.Tensor:
        return torch.tensor(numbers if idle is None else [idle, *numbers, idle], dtype=torch.float64)

    return LossInputs(
        values=widen(VALUES).requires_grad_(),
        columns={
            "weights": widen(WEIGHTS, None if around is None else 0.0),
            "returns": widen(RETURNS),
            "values": widen(OLD_VALUES),
        },
    )


def value_gradient(inputs: LossInputs, **params: Any) -> list[float]:
    assert inputs.values is not None
    (gradient,) = torch.autograd.grad(value(inputs, **params).loss, inputs.values)
    numbers: list[float] = gradient.tolist()
    return numbers


def test_the_critics_loss_of_three_tokens_worked_by_hand() -> None:
    assert value(three_values()).loss.item() == 0.5 * (0.5 * 1 + 0.25 * 4 + 0.25 * 0.0625)
    assert value(three_values(), value_clip=0.5).loss.item() == 0.5 * (0.5 * 6.25 + 0.25 * 4 + 0.25 * 0.0625)


def test_the_critics_gradient_is_weight_times_error_where_the_clip_does_not_decide() -> None:
    assert value_gradient(three_values()) == [0.5 * -1.0, 0.25 * 2.0, 0.25 * 0.25]
    assert value_gradient(three_values(), value_clip=0.5) == [0.0, 0.25 * 2.0, 0.25 * 0.25]


def test_the_critics_metrics_of_three_tokens_worked_by_hand() -> None:
    result = value(three_values(), value_clip=0.5)
    metrics = dict(result.metrics)
    loss = metrics.pop("loss")
    assert (loss.total.item(), loss.reduction) == (result.loss.item(), Reduction.LOSS)
    assert {name: mean(metric) for name, metric in metrics.items()} == pytest.approx(
        {"value": 5.25 / 3, "return": 4 / 3, "value_error": 3.25 / 3, "value_clip_fraction": 1 / 3}
    )
    assert not any(metric.total.requires_grad for metric in result.metrics.values())
    assert mean(value(three_values()).metrics["value_clip_fraction"]) == 0.0


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
    assert value_gradient(inputs, value_clip=value_clip) == pytest.approx(slopes)
    assert mean(result.metrics["value_clip_fraction"]) == pytest.approx(clip_decides / 300)


@pytest.mark.parametrize("value_clip", [0.0, 0.5])
@pytest.mark.parametrize("poison", [7.0, math.inf, -math.inf, math.nan])
def test_tokens_of_weight_zero_reach_nothing_of_the_critics(poison: float, value_clip: float) -> None:
    alone, among = (value(three_values(around=around), value_clip=value_clip) for around in (None, poison))
    assert among.loss.item() == alone.loss.item()
    assert_equal_metrics(among, alone)
    expected = [0.0, *value_gradient(three_values(), value_clip=value_clip), 0.0]
    assert value_gradient(three_values(around=poison), value_clip=value_clip) == expected


def test_a_filler_micro_batch_of_the_critic_has_a_gradient_of_zero() -> None:
    inputs = three_values()
    filler = LossInputs(values=inputs.values, columns={**inputs.columns, "weights": torch.zeros(3)})
    assert value_gradient(filler, value_clip=0.5) == [0.0, 0.0, 0.0]
    assert {metric.total.item() for metric in value(filler, value_clip=0.5).metrics.values()} == {0.0}


def test_a_missing_column_or_output_of_the_critic_is_named() -> None:
    inputs = three_values()
    with pytest.raises(ContractError, match="loss 'value' got no values; request them in LossSpec.outputs"):
        value(LossInputs(columns=inputs.columns))
    without = {name: column for name, column in inputs.columns.items() if name != "values"}
    with pytest.raises(ContractError, match=r"loss 'value' needs the column 'values' \[T\]; got: returns, weights"):
        value(LossInputs(values=inputs.values, columns=without), value_clip=0.5)
    assert value(LossInputs(values=inputs.values, columns=without)).loss.item() == value(inputs).loss.item()


# ---- sums of log-probs with weights of their own ---------------------------------------------------------------------

SLOPES = [2.0, -1.0, 0.5]


def three_weighted(*, around: float | None = None) -> LossInputs:
    """Log-probs -1, -2, -4, between two tokens of weight zero that hold `around` where it is given."""

    def widen(numbers: list[float], idle: float | None = around) -> torch.Tensor:
        return torch.tensor(numbers if idle is None else [idle, *numbers, idle], dtype=torch.float64)

    return LossInputs(
        logprobs=widen([-1.0, -2.0, -4.0]).requires_grad_(),
        columns={"weights": widen(WEIGHTS, None if around is None else 0.0), "logprob_weights": widen(SLOPES)},
    )


def test_weighted_logprobs_of_three_tokens_worked_by_hand() -> None:
    inputs = three_weighted()
    result = weighted_logprobs(inputs)
    wanted = WEIGHTS[0] * 2.0 * -1.0 + WEIGHTS[1] * -1.0 * -2.0 + WEIGHTS[2] * 0.5 * -4.0
    assert result.loss.item() == wanted
    assert inputs.logprobs is not None
    (gradient,) = torch.autograd.grad(result.loss, inputs.logprobs)
    assert gradient.tolist() == [w * s for w, s in zip(WEIGHTS, SLOPES, strict=True)]
    ((name, metric),) = result.metrics.items()
    assert (name, metric.total.item(), metric.weight.item(), metric.reduction) == ("loss", wanted, 3, Reduction.LOSS)
    assert not metric.total.requires_grad


def preference(logprobs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Of two samples of three tokens, that the first be likelier: no sum over tokens, and over no micro-batch."""
    first, second = torch.where(counted, logprobs, 0.0).split(3)
    return -torch.nn.functional.logsigmoid(0.3 * (first.sum() - second.sum()))


def test_a_loss_that_is_computed_elsewhere_moves_the_model_as_it_would_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(8, (6, 1), generator=generator)
    counted = torch.tensor([False, True, True, False, True, True])
    start = torch.randn(4, 8, generator=generator, dtype=torch.float64)

    def logprobs_of(weight: torch.Tensor) -> torch.Tensor:
        return (features @ weight).log_softmax(-1).gather(-1, targets)[:, 0]

    direct = start.clone().requires_grad_()
    preference(logprobs_of(direct), counted).backward()

    seen = logprobs_of(start).requires_grad_()  # as a pass without gradients gives them
    (slopes,) = torch.autograd.grad(preference(seen, counted), seen)
    by_weights = start.clone().requires_grad_()
    columns = {"weights": counted.double(), "logprob_weights": slopes.where(counted, math.nan)}
    # In two micro-batches, each of one sample.
    for part in (slice(3), slice(3, None)):
        logprobs = logprobs_of(by_weights)[part]
        weighted_logprobs(
            LossInputs(logprobs=logprobs, columns={name: column[part] for name, column in columns.items()})
        ).loss.backward()
    assert direct.grad is not None and by_weights.grad is not None and direct.grad.abs().max() > 0.01
    torch.testing.assert_close(by_weights.grad, direct.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("poison", [7.0, math.inf, -math.inf, math.nan])
def test_tokens_of_weight_zero_reach_nothing_of_weighted_logprobs(poison: float) -> None:
    alone, among = (three_weighted(around=around) for around in (None, poison))
    results = [weighted_logprobs(each) for each in (alone, among)]
    assert results[1].loss.item() == results[0].loss.item()
    assert_equal_metrics(results[1], results[0])
    gradients = []
    for inputs, result in zip((alone, among), results, strict=True):
        assert inputs.logprobs is not None
        gradients.append(torch.autograd.grad(result.loss, inputs.logprobs)[0].tolist())
    assert gradients[1] == [0.0, *gradients[0], 0.0]


def test_a_missing_column_or_output_of_weighted_logprobs_is_named() -> None:
    inputs = three_weighted()
    with pytest.raises(ContractError, match="loss 'weighted_logprobs' got no log-probs; request them in LossSpec"):
        weighted_logprobs(LossInputs(columns=inputs.columns))
    columns = {"weights": inputs.columns["weights"]}
    with pytest.raises(
        ContractError, match=r"loss 'weighted_logprobs' needs the column 'logprob_weights' \[T\]; got: "
    ):
        weighted_logprobs(LossInputs(logprobs=inputs.logprobs, columns=columns))
