"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, and the penalty of a loss.

Schulman 2020, "Approximating KL Divergence".

With d = log p_reference - log p_policy, for tokens sampled from the policy:

    k1 = -d                   unbiased, high variance, may be negative
    k2 = d^2 / 2              biased, low variance
    k3 = exp(d) - 1 - d       unbiased, non-negative, low variance

These are values. The derivative of an estimator of the KL is not an estimator of its gradient (Tang and Munos 2025, "On
a few pitfalls in KL divergence gradient estimation for RL"), so `penalty` has a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from corerl.errors import ConfigError
from corerl.types import BoolArray, FloatArray

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) = 5e8 is far beyond any meaningful ratio, and its products still fit into float32. Without the clamp, one
# stale token at a log-ratio of 90 turns the whole step into inf.
MAX_LOG_RATIO = 20.0


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    # Clamp only from above: if the policy has become far likelier than the reference, the pull back must remain.
    d = (reference - logprobs).clamp(max=MAX_LOG_RATIO)
    return d.expm1() - d


DIFFERENTIATED = "k3-differentiated"  # in value k3, see `penalty`
ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, DIFFERENTIATED: k3}


def estimator_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator of this name, `(logprobs [T], reference [T]) -> [T]`; ConfigError for an unknown name."""
    if name not in ESTIMATORS:
        raise ConfigError(f"algorithm.kl_estimator: unknown estimator {name!r}; use one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def penalty(logprobs: Tensor, reference: Tensor, log_ratio: Tensor, *, estimator: str) -> Tensor:
    """[T] the KL penalty of tokens that the old policy sampled: an estimate in value, the KL's own slope in gradient.

        value       r k                                    r = p / p_old = exp(log_ratio)
        gradient    r log(p / p_reference) grad log p      r and the logarithm are held fixed

    In expectation over the old policy's tokens at a state, the gradient is that of KL(p || p_reference) there, whatever
    the estimator, in the first optimizer step on a batch and in later ones: r makes it an expectation over p, under
    which the score grad log p has the mean 0. The value is unbiased with k1 and k3; with k3 the gradient is also its
    derivative (DeepSeek-AI 2025, "DeepSeek-V3.2", eq. 7). States are those that the old policy visited: that the policy
    also changes which states come next has no part in it.

    "k3-differentiated" is k3 without r, and its derivative: the penalty of Shao et al. 2024, "DeepSeekMath", eq. 4. In
    expectation its gradient is that of KL(p_reference || p) in the first optimizer step, and of neither in later ones.

        logprobs, reference, log_ratio: [T] log_ratio is clamped to +-20: a token beyond has too small or large an r
    """
    if estimator == DIFFERENTIATED:
        return k3(logprobs, reference)
    ratio, policy = log_ratio.detach().exp(), logprobs.detach()
    slope = ratio * (policy - reference)
    return ratio * estimator_of(estimator)(policy, reference) + slope * (logprobs - policy)


def token_kl(logprobs: FloatArray, reference: FloatArray, loss_mask: BoolArray, *, estimator: str) -> FloatArray:
    """[N] KL estimates at each loss token, 0 elsewhere, in numpy; ConfigError for an unknown estimator.

    Other tokens are not read. Subtracted from each token's reward, this is the penalty of Ziegler et al. 2019,
    "Fine-Tuning Language Models from Human Preferences", eq. 2. They use k1, the only estimator whose gradient is then
    that of the KL; a reward of k2 or k3 may lead away from the reference.
    """
    import torch  # losses load without

    estimate = estimator_of(estimator)
    policy, other = (torch.from_numpy(each[loss_mask].astype(np.float64)) for each in (logprobs, reference))
    divergence = np.zeros(len(loss_mask), dtype=np.float32)
    divergence[loss_mask] = estimate(policy, other).numpy()
    return divergence
