"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

Schulman 2020, "Approximating KL Divergence".

With d = log p_reference - log p_policy, the token being drawn from the policy:

    k1 = -d                   unbiased, high variance, may be negative
    k2 = d^2 / 2              biased, low variance; its gradient is that of the KL, in expectation
    k3 = exp(d) - 1 - d       unbiased, non-negative, low variance

As a penalty inside the loss k1 has a gradient of zero in expectation: it only adds noise, and is of use as a metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from corerl.errors import ConfigError

# exp(20) = 5e8 is far beyond any ratio that means something, and its products still fit into float32. Without the
# clamp one stale token at a log-ratio of 90 turns the whole step into inf.
MAX_LOG_RATIO = 20.0


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    # Only from above: where the policy has become far likelier than the reference, the pull back must remain.
    d = (reference - logprobs).clamp(max=MAX_LOG_RATIO)
    return d.expm1() - d


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator `(logprobs [T], reference [T]) -> [T]` of this name; ConfigError where there is none."""
    if name not in ESTIMATORS:
        raise ConfigError(f"algorithm.kl_estimator: unknown estimator {name!r}; take one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
