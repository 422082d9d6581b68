"""Losses as pure functions of per-token tensors: plain sums, since token weights include the normalization."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from corerl.algorithms.kl import MAX_LOG_RATIO, penalty
from corerl.errors import ContractError
from corerl.types import Reduction

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class LossInputs:
    """The model's outputs and the batch's columns for T packed tokens."""

    logprobs: Tensor | None = None  # [T], or as the column `targets` [T, K]; with gradient, if requested
    entropy: Tensor | None = None  # [T] with gradient, if requested
    values: Tensor | None = None  # [T] with gradient, if requested
    columns: Mapping[str, Tensor] = field(factory=dict)  # each [T, ...]: weights [T], advantages, old_logprobs, ...
    bounds: Tensor | None = None  # [S + 1] sample s is tokens bounds[s]:bounds[s + 1]; none is split over micro-batches


@frozen
class TensorMetric:
    """A metric that is still on the device; see corerl.types.Metric."""

    total: Tensor  # 0-d
    weight: Tensor  # 0-d
    reduction: Reduction = Reduction.MEAN


@frozen
class LossResult:
    """The loss of T packed tokens, and what a step reports about it."""

    loss: Tensor  # 0-d, sum over tokens
    metrics: Mapping[str, TensorMetric] = field(factory=dict)


class Loss(Protocol):
    """A function of the inputs, and of scalar parameters passed by name."""

    def __call__(self, inputs: LossInputs, *args: Any, **params: Any) -> LossResult: ...


# Metrics of every policy, besides those of `mismatch`.
COMMON = frozenset({"ratio", "approx_kl", "entropy", "kl", "loss", "policy_loss"})


@frozen(kw_only=True, eq=False)
class PolicyTokens:
    """What the loss of a policy reads of T packed tokens, each [T] and 0 at tokens that do not count.

    Only tokens with a nonzero weight count: values at prompts, padding and fillers, even inf or NaN, affect neither the
    loss nor a gradient nor a metric.
    """

    inputs: LossInputs
    name: str  # of the loss, for messages
    weights: Tensor  # include 1 / denominator
    counted: Tensor  # bool
    logprobs: Tensor  # with gradient
    advantages: Tensor
    log_ratio: Tensor  # logprobs - old_logprobs, clamped to +-20

    @classmethod
    def of(cls, inputs: LossInputs, *, name: str) -> PolicyTokens:
        """Reads the columns `weights`, `advantages` and `old_logprobs`. ContractError if one, or the log-probs, are
        missing."""
        if inputs.logprobs is None:
            raise ContractError(
                f"loss {name!r} got no log-probs; request them in LossSpec.outputs, and pass them in LossInputs"
            )
        if inputs.logprobs.dim() > 1:
            raise ContractError(
                f"loss {name!r} takes one log-prob for each token, but the column 'targets' has "
                f"{inputs.logprobs.shape[1]} tokens at each; leave it out, or use the loss 'weighted_logprobs'"
            )
        column = partial(_column, inputs, loss=name)
        weights = column("weights")
        counted = weights != 0
        logprobs = _where(counted, inputs.logprobs)
        advantages = _where(counted, column("advantages"))
        log_ratio = logprobs - _where(counted, column("old_logprobs"))
        return cls(
            inputs=inputs,
            name=name,
            weights=weights,
            counted=counted,
            logprobs=logprobs,
            advantages=advantages,
            log_ratio=log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        )

    def column(self, name: str) -> Tensor:
        """[T] another column of the batch. ContractError if it is missing."""
        return _where(self.counted, _column(self.inputs, name, loss=self.name))

    def sample_mean(self, values: Tensor) -> Tensor:
        """[T] at each token the mean of `values` [T] over the counted tokens of its sample, with gradient."""
        bounds = self.inputs.bounds
        if bounds is None:
            raise ContractError(f"loss {self.name!r} needs to know where each sample begins; pass LossInputs.bounds")
        import torch  # not at the top: an algorithm's spec is in one file with its loss, and loads without torch

        bounds = bounds.long()
        sums = torch.segment_reduce(_where(self.counted, values), "sum", offsets=bounds, initial=0)
        counts = torch.segment_reduce(self.counted.to(values.dtype), "sum", offsets=bounds, initial=0)
        return (sums / counts.clamp(min=1)).repeat_interleave(bounds.diff(), output_size=len(values))

    def result(
        self,
        policy_term: Tensor,
        metrics: Mapping[str, Tensor] | None = None,
        *,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
    ) -> LossResult:
        """The loss whose policy term at each token is `policy_term` [T], with what all policy losses share: an entropy
        bonus and a KL penalty.

            loss = sum_t weights_t * (policy_term_t - entropy_coef * H_t + kl_coef * KL_t)

        KL_t is `corerl.algorithms.kl.penalty`: `kl_estimator` says how its value is estimated, its gradient is that of
        the KL. Reads the column `rollout_logprobs`, and with a `kl_coef` also `ref_logprobs`.

        Metrics: `loss` and `policy_loss` are sums with the loss's own weights. All others are means over loss tokens,
        each counted once whatever the aggregation, so that runs can be compared: `metrics`, each [T], `entropy`,
        `ratio`, `approx_kl` (from the old policy), `kl` (from the reference), and those of `mismatch` between trainer
        and engine. `entropy` is missing without one in the inputs; ContractError if `entropy_coef` needs it.
        """
        if taken := sorted(COMMON & (metrics or {}).keys()):
            raise ContractError(f"loss {self.name!r} has a metric {taken[0]!r}, which all policies have; rename it")
        entropy, tokens = self.inputs.entropy, self.counted.sum()
        policy_loss = (self.weights * policy_term).sum()
        loss = policy_loss

        def mean(values: Tensor) -> TensorMetric:
            return TensorMetric(_where(self.counted, values.detach()).sum(), tokens)

        found = {
            "ratio": mean(self.log_ratio.exp()),
            **{name: mean(values.to(self.logprobs.dtype)) for name, values in (metrics or {}).items()},
            # k3 with the roles swapped: the old policy sampled
            "approx_kl": mean(self.log_ratio.expm1() - self.log_ratio),
            **mismatch(self.logprobs.detach(), self.column("rollout_logprobs"), self.counted),
        }
        if entropy is not None:
            found["entropy"] = mean(entropy)
        if entropy_coef:
            if entropy is None:
                raise ContractError(
                    f"loss {self.name!r} has entropy_coef={entropy_coef} but got no entropy; "
                    "request it in LossSpec.outputs, and pass it in LossInputs"
                )
            loss = loss - entropy_coef * (self.weights * _where(self.counted, entropy)).sum()
        if kl_coef:
            kl = penalty(self.logprobs, self.column("ref_logprobs"), self.log_ratio, estimator=kl_estimator)
            found["kl"] = mean(kl)
            loss = loss + kl_coef * (self.weights * kl).sum()
        found["loss"] = TensorMetric(loss.detach(), tokens, Reduction.LOSS)
        found["policy_loss"] = TensorMetric(policy_loss.detach(), tokens, Reduction.LOSS)
        return LossResult(loss, found)


def surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """[T] PPO's clipped surrogate, which a policy maximizes, and where the clip is active and the gradient is 0 (bool).

        min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; two bounds: Yu et al. 2025, "DAPO", eq. 8.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return free.minimum(bounded), bounded < free


def clipped(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossResult:
    """PPO's clipped policy loss: -`surrogate` of the tokens' ratios r_t = exp(logprobs_t - old_logprobs_t).

    With a `dual_clip` c, it is at most -c A_t where A_t is negative: a token that has become much likelier does not
    push without bound. Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
    eq. 5. The other parameters, and what is read besides: `PolicyTokens`.

    Metrics besides the common ones: `clip_fraction` and `dual_clip_fraction`, of tokens at which the clip is active and
    the policy term's gradient is 0.
    """
    tokens = PolicyTokens.of(inputs, name="clipped")
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    gain, at_bound = surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    metrics = {"clip_fraction": at_bound}
    if dual_clip:
        lowest = dual_clip * advantages
        metrics["dual_clip_fraction"] = (advantages < 0) & (gain < lowest)
        gain = gain.maximum(lowest).where(advantages < 0, gain)
    return tokens.result(-gain, metrics, entropy_coef=entropy_coef, kl_coef=kl_coef, kl_estimator=kl_estimator)


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
    loss = (weights * 0.5 * free.maximum(bounded)).sum()

    tokens = counted.sum()

    def mean(each: Tensor) -> TensorMetric:  # already 0 at tokens that do not count
        return TensorMetric(each.detach().sum(), tokens)

    return LossResult(
        loss,
        {
            "loss": TensorMetric(loss.detach(), tokens, Reduction.LOSS),
            "value": mean(values),
            "return": mean(returns),
            "value_error": mean((values - returns).abs()),
            "value_clip_fraction": mean((bounded > free).to(free.dtype)),
        },
    )


def weighted_logprobs(inputs: LossInputs) -> LossResult:
    """A weighted sum of log-probs, from which any loss of log-probs follows that is computed elsewhere.

        loss = sum_t weights_t * logprob_weights_t * logprobs_t

    With dL / dlogprobs_t as the weights, its gradient is that of L, by the chain rule; its value is not L's. With K
    `targets` at each token, `logprob_weights` and log-probs are [T, K], and the sum is over all of them.

    Columns, each [T]: `weights` (include 1 / denominator) and `logprob_weights`. Only tokens with a nonzero weight
    count, as in `clipped`. The metric `loss` is a sum with the loss's own weights.
    """
    name = "weighted_logprobs"
    if inputs.logprobs is None:
        raise ContractError(
            f"loss {name!r} got no log-probs; request them in LossSpec.outputs, and pass them in LossInputs"
        )
    weights, slopes = (_column(inputs, each, loss=name) for each in ("weights", "logprob_weights"))
    if slopes.shape != inputs.logprobs.shape:
        raise ContractError(
            f"loss {name!r} got the column 'logprob_weights' {list(slopes.shape)} for log-probs "
            f"{list(inputs.logprobs.shape)}; give it the shape of the column 'targets', or [T] without that"
        )
    weights = weights.view(-1, *[1] * (slopes.dim() - 1))
    counted = weights != 0
    loss = (weights * _where(counted, slopes) * _where(counted, inputs.logprobs)).sum()
    return LossResult(loss, {"loss": TensorMetric(loss.detach(), counted.sum(), Reduction.LOSS)})


def _where(counted: Tensor, values: Tensor) -> Tensor:
    """`values` with 0 at tokens that do not count. A weight of 0 would not be enough: 0 * inf is NaN, in the value and
    in the gradient."""
    return values.where(counted, 0)


def _column(inputs: LossInputs, name: str, *, loss: str) -> Tensor:
    if name not in inputs.columns:
        raise ContractError(f"loss {loss!r} needs the column {name!r} [T]; got: {', '.join(sorted(inputs.columns))}")
    return inputs.columns[name]
