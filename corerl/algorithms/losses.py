"""Losses as pure functions of per-token tensors: plain sums, since token weights include the normalization."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from corerl.algorithms.kl import MAX_LOG_RATIO, estimator
from corerl.errors import ContractError
from corerl.types import Reduction


@frozen(kw_only=True)
class LossInputs:
    """The model's outputs and the batch's columns for T packed tokens."""

    logprobs: Tensor | None = None  # [T] with gradient, if requested
    entropy: Tensor | None = None  # [T] with gradient, if requested
    values: Tensor | None = None  # [T] with gradient, if requested
    columns: Mapping[str, Tensor] = field(factory=dict)  # each [T]: weights, advantages, old_logprobs, ...


@frozen
class TensorMetric:
    """A metric that is still on the device; see corerl.types.Metric."""

    total: Tensor  # 0-d
    weight: Tensor  # 0-d
    reduction: Reduction = Reduction.MEAN


@frozen
class LossResult:
    loss: Tensor  # 0-d, sum over tokens
    metrics: Mapping[str, TensorMetric] = field(factory=dict)


class Loss(Protocol):
    """A function of the inputs, and of scalar parameters passed by name."""

    def __call__(self, inputs: LossInputs, *args: Any, **params: Any) -> LossResult: ...


def clipped(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossResult:
    """PPO's clipped policy loss, with separate lower and upper bounds, an entropy bonus and a KL penalty.

        r_t  = exp(logprobs_t - old_logprobs_t)
        loss = sum_t weights_t * ( -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
                                   - entropy_coef * H_t + kl_coef * KL_t )

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; two bounds: Yu et al. 2025, "DAPO"; the
    penalty in the loss: Shao et al. 2024, "DeepSeekMath", eq. 3. Estimators of the KL: `corerl.algorithms.kl`.

    Columns, each [T]: `weights` (include 1 / denominator), `advantages`, `old_logprobs`, `rollout_logprobs`, and with a
    `kl_coef` also `ref_logprobs`. Only tokens with a nonzero weight count: values at prompts, padding and fillers, even
    inf or NaN, affect neither the loss nor a gradient nor a metric.

    Metrics: `loss` and `policy_loss` are sums with the loss's own weights. All others are means over loss tokens, each
    counted once whatever the aggregation, so that runs can be compared: `entropy`, `ratio`, `clip_fraction` (the clip
    is active and the policy term's gradient is 0), `approx_kl` (from the old policy), `kl` (from the reference), and
    those of `mismatch` between trainer and engine.

    `entropy` may be None if entropy_coef is 0; its metric is then missing. ContractError if another input is missing.
    """
    if inputs.logprobs is None:
        raise ContractError(
            "loss 'clipped' got no log-probs; request them in LossSpec.outputs, and pass them in LossInputs"
        )
    column = partial(_column, inputs, loss="clipped")
    weights = column("weights")
    counted = weights != 0
    at_loss_tokens = partial(_where, counted)
    logprobs = at_loss_tokens(inputs.logprobs)
    advantages = at_loss_tokens(column("advantages"))
    log_ratio = logprobs - at_loss_tokens(column("old_logprobs"))
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    policy_loss = (weights * -torch.minimum(free, bounded)).sum()
    loss = policy_loss

    tokens = counted.sum()

    def mean(values: Tensor) -> TensorMetric:
        return TensorMetric(at_loss_tokens(values.detach()).sum(), tokens)

    metrics = {
        "ratio": mean(ratio),
        "clip_fraction": mean((bounded < free).to(ratio.dtype)),
        "approx_kl": mean(log_ratio.expm1() - log_ratio),  # k3 with the roles swapped: the old policy sampled
        **mismatch(logprobs.detach(), at_loss_tokens(column("rollout_logprobs")), counted),
    }
    if inputs.entropy is not None:
        metrics["entropy"] = mean(inputs.entropy)
    if entropy_coef:
        if inputs.entropy is None:
            raise ContractError(
                f"loss 'clipped' has entropy_coef={entropy_coef} but got no entropy; "
                "request it in LossSpec.outputs, and pass it in LossInputs"
            )
        loss = loss - entropy_coef * (weights * at_loss_tokens(inputs.entropy)).sum()
    if kl_coef:
        kl = estimator(kl_estimator)(logprobs, at_loss_tokens(column("ref_logprobs")))
        metrics["kl"] = mean(kl)
        loss = loss + kl_coef * (weights * kl).sum()
    metrics["loss"] = TensorMetric(loss.detach(), tokens, Reduction.SUM)
    metrics["policy_loss"] = TensorMetric(policy_loss.detach(), tokens, Reduction.SUM)
    return LossResult(loss, metrics)


APART = (0.1, 1.0)  # log-prob differences above which tokens are counted: ratios of 1.1 and e


def mismatch(trainer: Tensor, engine: Tensor, counted: Tensor) -> dict[str, TensorMetric]:
    """How far apart the log-probs [T] of trainer and engine are for the same tokens, over the tokens `counted` [T].

        logprob_diff           mean of |trainer - engine|
        logprob_diff_max       the largest
        logprob_kl             KL(engine | trainer), estimated by k3 from the engine's tokens: the mean of
                               exp(d) - 1 - d with d = trainer - engine (Schulman 2020, "Approximating KL Divergence")
        logprob_diff_above_X   fraction of tokens whose difference is above X, for 0.1 and 1

    Right after an update, in float32, all are 0 up to rounding. With an engine in another precision they measure how
    far off-policy training is; for stale tokens they also include how far the policy has moved.
    """
    difference = _where(counted, trainer - engine)
    size, tokens = difference.abs(), counted.sum()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "logprob_diff": TensorMetric(size.sum(), tokens),
        "logprob_diff_max": TensorMetric(size.max(), tokens, Reduction.MAX),
        "logprob_kl": TensorMetric((bounded.expm1() - bounded).sum(), tokens),
        # Negated, so that NaN counts as well.
        **{f"logprob_diff_above_{limit:g}": TensorMetric((~(size <= limit)).sum(), tokens) for limit in APART},
    }


def value(inputs: LossInputs, *, value_clip: float = 0.0) -> LossResult:
    """A critic's squared error, without credit for moving further than `value_clip` from its old values.

        bounded_t = clip(v_t, old_t - value_clip, old_t + value_clip)
        loss      = sum_t weights_t * 1/2 max((v_t - R_t)^2, (bounded_t - R_t)^2)

    and without the second square if value_clip is 0. Squared error: Schulman et al. 2017, "Proximal Policy
    Optimization Algorithms", eq. 9. The clip, with the half: OpenAI Baselines' PPO2, studied in Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients".

    Columns, each [T]: `weights` (include 1 / denominator), `returns`, and with a `value_clip` also `values`, the
    critic's own before the update. Only tokens with a nonzero weight count, as in `clipped`.

    Metrics: `loss` is a sum with the loss's own weights. All others are means over loss tokens: `value`, `return`,
    `value_error` (|v - R|) and `value_clip_fraction` (the clip is active and the gradient is 0).
    """
    if inputs.values is None:
        raise ContractError("loss 'value' got no values; request them in LossSpec.outputs, and pass them in LossInputs")
    column = partial(_column, inputs, loss="value")
    weights = column("weights")
    counted = weights != 0
    at_loss_tokens = partial(_where, counted)
    values = at_loss_tokens(inputs.values)
    returns = at_loss_tokens(column("returns"))
    free = (values - returns) ** 2
    bounded = free
    if value_clip:
        old = at_loss_tokens(column("values"))
        bounded = (values.clamp(old - value_clip, old + value_clip) - returns) ** 2
    loss = (weights * 0.5 * torch.maximum(free, bounded)).sum()

    tokens = counted.sum()

    def mean(each: Tensor) -> TensorMetric:  # already 0 at tokens that do not count
        return TensorMetric(each.detach().sum(), tokens)

    return LossResult(
        loss,
        {
            "loss": TensorMetric(loss.detach(), tokens, Reduction.SUM),
            "value": mean(values),
            "return": mean(returns),
            "value_error": mean((values - returns).abs()),
            "value_clip_fraction": mean((bounded > free).to(free.dtype)),
        },
    )


def _where(counted: Tensor, values: Tensor) -> Tensor:
    """`values` with 0 at tokens that do not count. A weight of 0 would not be enough: 0 * inf is NaN, in the value and
    in the gradient."""
    return torch.where(counted, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _column(inputs: LossInputs, name: str, *, loss: str) -> Tensor:
    if name not in inputs.columns:
        raise ContractError(f"loss {loss!r} needs the column {name!r} [T]; got: {', '.join(sorted(inputs.columns))}")
    return inputs.columns[name]
