"""From advantages to gradients: tokens that do not count, how a step is divided, derivatives, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from attrs import evolve

from corerl.algorithms import ACTOR, PolicyTokens, RoleKind
from corerl.algorithms.kl import penalty
from corerl.backend import MetricSum
from corerl.driver.metrics import train_metrics
from corerl.types import Array, Metric, MicroBatch, Output, Reduction, rows_at
from corerl_testing.marks import algorithm_check as check
from corerl_testing.tolerances import DIFFERENCES, FLOAT64
from corerl_testing.trial import OWN, PACKINGS, WHOLE, Found, Packing, Trial, loss_inputs, other_numbers

STEP = 1e-6  # of a finite difference
ROUNDING = 1e-9  # of a loss in float64, divided by that
KINK = 1e-3  # by so much of the largest gradient may slopes to both sides differ, unless a clip begins in between
KEPT = {"loss_mask"}  # which says the same as weights
OF_DRIVER = ("rollout/", "reward/", "correction/", "eval/", "time/", "perf/", "memory/")  # prefixes of core's metrics


@check("A12", level=1, builds_on=["A08"])
def test_tokens_without_weight_change_neither_loss_nor_gradients_nor_metrics(trial: Trial) -> None:
    for role in trial.plan.objectives:
        step = trial.divided(role, WHOLE)
        finite = all(np.isfinite(gradient).all() for gradient in step.gradients.values())
        assert finite and np.isfinite(step.loss), (
            f"the loss of the {role} is {step.loss}, its gradients are {'' if finite else 'not '}finite; clamp "
            "log-ratios before exp(), and guard divisions"
        )
        columns = [*sorted(trial.batch.columns.keys() - KEPT), *(f"{OWN}{output}" for output in trial.outputs(role))]
        for packing in (PACKINGS["padded sequences"], PACKINGS["3 dp ranks with fillers"]):
            if not changed(trial, role, packing, columns):
                continue
            for name in columns:
                what = changed(trial, role, packing, [name])
                kind = "output" if name.startswith(OWN) else "column"
                assert not what, (
                    f"with other numbers in the {kind} {name.removeprefix(OWN)!r} at tokens of weight 0, {what}; "
                    "select tokens by torch.where(weights != 0, ...) before anything is computed, since 0 * NaN is NaN"
                )
            raise AssertionError(
                f"other numbers in several columns at tokens of weight 0 change the loss of the {role}"
            )
        outside = ~trial.batch.columns["loss_mask"]
        for output, gradient in step.gradients.items():
            assert not gradient[outside].any(), (
                f"the loss of the {role} has a gradient of {output} at tokens of weight 0; multiply each token's term "
                "by its weight"
            )


def changed(trial: Trial, role: str, packing: Packing, columns: Sequence[str]) -> str:
    """What changes, in any bit, if these columns have other numbers at tokens of weight 0; "" if nothing does."""
    wanted = trial.divided(role, packing)
    found = trial.step(role, trial.batch, trial.outputs(role), packing, partial(rewritten, columns=columns))
    if found.loss != wanted.loss:
        return f"the loss of the {role} changes from {wanted.loss} to {found.loss}"
    for output, gradient in found.gradients.items():
        if not np.array_equal(gradient, wanted.gradients[output]):
            return f"the gradient of the loss of the {role} with respect to {output} changes"
    for name, metric in found.metrics.items():
        if metric != wanted.metrics[name]:
            return f"the metric {name!r} of the {role} changes from {wanted.metrics[name].value} to {metric.value}"
    return ""


def rewritten(micro: MicroBatch, columns: Sequence[str]) -> MicroBatch:
    places = micro.columns["weights"] == 0
    others = {
        name: other_numbers(micro.columns[name], places, seed=seed + len(places)) for seed, name in enumerate(columns)
    }
    return evolve(micro, columns={**micro.columns, **others})


@check("A13", level=1, builds_on=["A12"])
def test_the_division_and_order_of_samples_do_not_matter(trial: Trial) -> None:
    order = np.random.default_rng(5).permutation(len(trial.batch))
    place, _ = rows_at(trial.batch.offsets, order)
    for role in trial.plan.objectives:
        wanted = trial.divided(role, WHOLE)
        for how, packing in PACKINGS.items():
            assert_same_step(trial.divided(role, packing), wanted, f"the loss of the {role}, with {how}")
        moved = {output: values[place] for output, values in trial.outputs(role).items()}
        gradients = {output: gradient[place] for output, gradient in wanted.gradients.items()}
        what = f"the loss of the {role}, with samples in another order"
        found = trial.step(role, trial.batch.take_rows(order), moved, WHOLE)
        assert_same_step(found, evolve(wanted, gradients=gradients), what)


def assert_same_step(found: Found, wanted: Found, what: str) -> None:
    assert equal(found.loss, wanted.loss), (
        f"{what}: its sum over micro-batches is {found.loss}, expected {wanted.loss}, that of the whole step; weights "
        "hold 1 / denominator, so add tokens up, and normalize nothing over a micro-batch"
    )
    for output, gradient in found.gradients.items():
        expected = wanted.gradients[output]
        near = equal(gradient, expected)
        assert near.all(), (
            f"{what}: the gradient of {output} is {gradient[~near][0]} at token {np.flatnonzero(~near)[0]}, expected "
            f"{expected[~near][0]}, as in one micro-batch; let a token depend on no other sample's"
        )


def equal(found: Array | float, wanted: Array | float) -> Array:
    """Where they are equal but for the rounding of float64 (bool)."""
    return np.asarray(np.isclose(found, wanted, rtol=FLOAT64.relative, atol=FLOAT64.absolute))


@check("A14", level=1, builds_on=["A12"])
def test_gradients_are_those_of_the_loss_or_of_the_policy(trial: Trial) -> None:
    """Each output's gradient equals finite differences of the loss. A loss of a policy that holds a factor fixed on
    purpose, as truncated importance weights are, has others for log-probs: then the gradient is the policy gradient
    - weight * advantage where the policy has not moved, and elsewhere points to the same side, or is 0. Where it has
    not moved, a step of any policy makes samples likelier that have higher advantages."""
    for role in trial.plan.objectives:
        assert trial.divided(role, PACKINGS["3 dp ranks with fillers"]).differentiable, (
            f"the loss of the {role} has no gradient in some micro-batch, but backends call its backward(): let it "
            "depend on the outputs, without detach() or no_grad(), also where no token counts"
        )
        micro = trial.whole(role)
        found = trial.evaluate(role, micro).gradients
        if trial.spec.roles[role] is RoleKind.POLICY:
            assert_improves(trial, role, micro)
        for output, gradient in found.items():
            loss = loss_of(trial, role, micro, output)
            if predicts(gradient, loss, micro, output):
                continue
            wanted, smooth = differences(loss, micro, output)
            largest = max(np.abs(wanted[smooth]).max(initial=0.0), np.abs(gradient).max(initial=0.0))
            apart = smooth & ~(np.abs(gradient - wanted) <= DIFFERENCES * largest)
            if not apart.any():
                continue
            place = np.flatnonzero(apart)[0]
            message = (
                f"the gradient of the {role}'s loss with respect to {output} is {gradient[place]:.6g} at token "
                f"{place}, but the loss changes by {wanted[place]:.6g}"
            )
            policy = trial.spec.roles[role] is RoleKind.POLICY and output is Output.LOGPROBS
            assert policy, f"{message}; remove detach() and no_grad(), and keep the outputs' dtype"
            assert_policy_gradient(trial, role, micro, gradient, message)


def assert_improves(trial: Trial, role: str, micro: MicroBatch) -> None:
    """The gradient of log-probs is on the policy gradient's side, over all tokens, where the policy has not moved."""
    still = micro.columns["old_logprobs"].astype(np.float64)
    unmoved = evolve(micro, columns={**micro.columns, f"{OWN}{Output.LOGPROBS}": still})
    found = trial.evaluate(role, unmoved).gradients[Output.LOGPROBS]
    own = -micro.columns["weights"].astype(np.float64) * micro.columns["advantages"]
    side = float(found @ own)
    assert side >= 0, (
        f"where log-probs equal old_logprobs, the gradient of the {role}'s loss makes what has high advantages less "
        f"likely: its product with -weight * advantage, over all tokens, is {side:.3g}; so give it the other sign"
    )


def loss_of(trial: Trial, role: str, micro: MicroBatch, output: Output) -> Callable[[Array], float]:
    """The loss as a function of this output [T]."""
    name = f"{OWN}{output}"
    return lambda values: trial.evaluate(
        role, evolve(micro, columns={**micro.columns, name: values})
    ).result.loss.item()


def predicts(gradient: Array, loss: Callable[[Array], float], micro: MicroBatch, output: Output) -> bool:
    """Whether the loss changes along a random direction as `gradient` [T] says. Two evaluations in place of two for
    each token; wrongly False where a clip begins in between."""
    values = micro.columns[f"{OWN}{output}"]
    direction = np.where(micro.columns["weights"] != 0, np.random.default_rng(6).normal(size=len(values)), 0.0)
    slope = (loss(values + STEP * direction) - loss(values - STEP * direction)) / (2 * STEP)
    return bool(np.isclose(slope, gradient @ direction, rtol=DIFFERENCES, atol=ROUNDING))


def differences(loss: Callable[[Array], float], micro: MicroBatch, output: Output) -> tuple[Array, Array]:
    """[T] central differences of the loss at tokens with a weight, 0 elsewhere; and where it is smooth (bool)."""
    values = micro.columns[f"{OWN}{output}"]
    here, slopes = loss(values), np.zeros((2, len(values)))
    for place in np.flatnonzero(micro.columns["weights"]):
        for side, sign in enumerate((1, -1)):
            moved = values.copy()
            moved[place] += sign * STEP
            slopes[side, place] = sign * (loss(moved) - here) / STEP
    smooth = np.abs(slopes[0] - slopes[1]) <= KINK * np.abs(slopes).max(initial=0.0)
    return slopes.mean(axis=0), smooth


def assert_policy_gradient(trial: Trial, role: str, micro: MicroBatch, gradient: Array, message: str) -> None:
    """`gradient` [T] of log-probs is, where the policy has moved, on the side of the policy gradient; and it is that
    where it has not."""
    columns = {name: torch.from_numpy(column) for name, column in micro.columns.items()}
    weights, advantages = columns["weights"].double(), columns["advantages"].double()

    def of_policy(logprobs: Array) -> tuple[Array, Array]:
        """[T] the gradients of -advantage * log-prob and of the KL penalty."""
        params = trial.plan.objectives[role].loss.params
        leaf = torch.from_numpy(logprobs).requires_grad_()
        own = -(weights * advantages).numpy()
        coefficient = float(params.get("kl_coef", 0.0))
        if not coefficient:
            return own, np.zeros_like(own)
        log_ratio = leaf - columns["old_logprobs"]
        kl = penalty(leaf, columns["ref_logprobs"].double(), log_ratio, estimator=str(params["kl_estimator"]))
        (found,) = torch.autograd.grad((coefficient * weights * kl).sum(), leaf)
        return own, found.numpy()

    name = f"{OWN}{Output.LOGPROBS}"
    own, of_kl = of_policy(micro.columns[name])
    against = (gradient - of_kl) * own < -DIFFERENCES * np.abs(own).max(initial=0.0) ** 2
    assert not against.any(), (
        f"{message}, and it points away from the policy gradient, {own[against][0]:.6g} at token "
        f"{np.flatnonzero(against)[0]}; a factor that is held fixed must not be negative"
    )
    still = micro.columns["old_logprobs"].astype(np.float64)
    unmoved = evolve(micro, columns={**micro.columns, name: still})
    found = trial.evaluate(role, unmoved).gradients[Output.LOGPROBS]
    own, of_kl = of_policy(still)
    apart = ~(np.abs(found - own - of_kl) <= DIFFERENCES * np.abs(own).max(initial=0.0))
    assert not apart.any(), (
        f"{message}; nor is it the policy gradient where log-probs equal old_logprobs: {found[apart][0]:.6g} at token "
        f"{np.flatnonzero(apart)[0]}, expected -weight * advantage = {(own + of_kl)[apart][0]:.6g}; remove detach() "
        "and no_grad(), or hold only factors fixed that are 1 there"
    )


@check("A15", level=1, builds_on=["A13"])
def test_metrics_are_the_same_however_a_step_is_divided(trial: Trial) -> None:
    for role in trial.plan.objectives:
        wanted = trial.divided(role, WHOLE).metrics
        for name, metric in wanted.items():
            assert np.isfinite(metric.value), (
                f"the metric {name!r} of the {role} is {metric.value}, expected a finite number"
            )
        for how, packing in PACKINGS.items():
            found = trial.divided(role, packing).metrics
            assert found.keys() == wanted.keys(), (
                f"with {how}, the {role} has the metrics {sorted(found)}, expected {sorted(wanted)}"
            )
            for name, metric in found.items():
                assert equal(metric.value, wanted[name].value), (
                    f"with {how}, the metric {name!r} of the {role} is {metric.value}, expected {wanted[name].value}, "
                    "that of the whole step; give TensorMetric the sum over tokens and their number, not their mean"
                )


@check("A16", level=1, builds_on=["A12"])
def test_metrics_have_names_of_their_own(trial: Trial) -> None:
    """A name that core uses means the same in every algorithm."""
    samples = trial.samples()
    of_core = set(train_metrics([], 0.0, prefix="")) | {"/kl_coef", "/kl_reference"}
    taken: set[str] = set()
    for role in trial.plan.objectives:
        prefix = "train" if role == ACTOR else role
        taken |= {f"{prefix}{name}" for name in of_core}
        found = trial.divided(role, WHOLE).metrics
        double = sorted(taken & {f"{prefix}/{name}" for name in found})
        assert not double, f"the loss of the {role} has metrics that core has too: {', '.join(double)}; rename them"
        taken |= {f"{prefix}/{name}" for name in found}
        if trial.spec.roles[role] is RoleKind.POLICY:
            for name, metric in common_metrics(trial.whole(role)).items():
                assert name not in found or equal(found[name].value, metric.value), (
                    f"the metric {name!r} of the {role} is {found[name].value}, but that is a name of core's, for "
                    f"{metric.value}, which all policies have; choose another"
                )
    for name in trial.estimate(samples, trial.rewards(samples), trial.token_rewards(samples)).metrics:
        assert "/" in name and not name.startswith(OF_DRIVER) and name not in taken, (
            f"advantages has the metric {name!r}; name it ROLE/NAME, not as core or a loss names one: "
            f"{', '.join([*OF_DRIVER, *sorted(taken)])}"
        )


def common_metrics(micro: MicroBatch) -> Mapping[str, Metric]:
    """Those that all policies' losses have, but for the loss."""
    tokens = PolicyTokens.of(loss_inputs(micro), name="of core")
    metrics = MetricSum()
    metrics.add(tokens.result(torch.zeros_like(tokens.logprobs)).metrics)
    return {name: each for name, each in metrics.finish().items() if each.reduction is not Reduction.LOSS}
