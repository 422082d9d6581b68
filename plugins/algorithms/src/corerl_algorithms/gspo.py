"""GSPO: the ratio of a whole sample is clipped, as it is the sample that gets the reward. Zheng et al. 2025, "Group
Sequence Policy Optimization"."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from corerl.algorithms import GRPO, AlgorithmSpec, GRPOOptions, LossInputs, LossResult, PolicyTokens, surrogate
from corerl.config import at_least, between, option

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class Options(GRPOOptions):
    # Section 5.1. A mean over tokens varies far less than the ratio of one.
    clip_low: float = option("a sample's ratio is clipped below 1 - clip_low", default=3e-4, validator=between(0, 1))
    clip_high: float = option("a sample's ratio is clipped above 1 + clip_high", default=4e-4, validator=at_least(0))


class GSPO(GRPO):
    """GRPO's advantages (eq. 6), and the loss `gspo`."""

    loss: ClassVar[str] = "corerl_algorithms.gspo:gspo"


class GSPOToken(GRPO):
    """GRPO's advantages, and the loss `gspo_token`."""

    loss: ClassVar[str] = "corerl_algorithms.gspo:gspo_token"


def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossResult:
    """PPO's clipped loss with the ratio s of each sample y, the geometric mean of its tokens' ratios.

        s      = (p(y) / p_old(y))^(1 / |y|) = exp(1/|y| sum_t (logprobs_t - old_logprobs_t))        eq. 7
        term_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t)                               eq. 5

    Only loss tokens count, and |y| is their number. If all advantages of a sample are equal, weights of the aggregation
    "sequence-mean" make the sum over its tokens one term of eq. 5. The common parameters, and what is read:
    `PolicyTokens`; it also needs the samples' bounds.

    Metrics besides the common ones: `sequence_ratio`, the mean of s, and `clip_fraction`, the share of samples whose
    clip is active and whose gradient is 0; both over tokens, so that a sample counts by its length.
    """
    tokens = PolicyTokens.of(inputs, name="gspo")
    gain, metrics = _gain(tokens, tokens.sample_mean(tokens.log_ratio), clip_low=clip_low, clip_high=clip_high)
    return tokens.result(-gain, metrics, entropy_coef=entropy_coef, kl_coef=kl_coef, kl_estimator=kl_estimator)


def gspo_token(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossResult:
    """`gspo` for advantages that differ within a sample: each token has a gradient of its own.

        s_t    = sg(s) p_t / sg(p_t)    s in value, p_t in gradient; sg stops it                     eq. 14
        term_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)                           eq. 13

    In value it is `gspo`, and in gradient too if the advantages of a sample are equal, and its weights. The parameters
    and metrics are those of `gspo`.
    """
    tokens = PolicyTokens.of(inputs, name="gspo_token")
    own = tokens.log_ratio.detach()
    log_ratio = tokens.sample_mean(own) + (tokens.log_ratio - own)
    gain, metrics = _gain(tokens, log_ratio, clip_low=clip_low, clip_high=clip_high)
    return tokens.result(-gain, metrics, entropy_coef=entropy_coef, kl_coef=kl_coef, kl_estimator=kl_estimator)


def _gain(
    tokens: PolicyTokens, log_ratio: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] what is maximized, and the metrics; `log_ratio` [T] is that of each token's sample."""
    ratio = log_ratio.exp()
    gain, at_bound = surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return gain, {"clip_fraction": at_bound, "sequence_ratio": ratio}


SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.gspo:GSPO",
    config=Options,
    api=(2, 0),
    summary="GRPO with the ratio and the clip of whole samples (Zheng et al. 2025)",
    by_prompt=True,
    defaults={"aggregation": "sequence-mean", "old_logprobs": "recompute"},
)
TOKEN_SPEC = AlgorithmSpec(
    implementation="corerl_algorithms.gspo:GSPOToken",
    config=Options,
    api=(2, 0),
    summary="GSPO for advantages that differ within a sample (Zheng et al. 2025, section 4.3)",
    by_prompt=True,
    defaults={"aggregation": "sequence-mean", "old_logprobs": "recompute"},
)
