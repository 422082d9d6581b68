"""Importance weights that correct for differences between the engine's policy and the trainer's."""

from __future__ import annotations

from typing import Literal

import numpy as np

from corerl.algorithms.kl import MAX_LOG_RATIO
from corerl.types import Array, FloatArray, SampleBatch


def importance_weights(
    old_logprobs: FloatArray,
    rollout_logprobs: FloatArray,
    batch: SampleBatch,
    *,
    level: Literal["token", "sequence"],
    cap: float,
) -> FloatArray:
    """[N] probability ratios trainer / engine of the sampled tokens, at most `cap`; 0 outside loss tokens.

        token:     w_t = min(exp(old_t - rollout_t), cap)
        sequence:  w_t = min(exp(sum of old_s - rollout_s over the loss tokens s of the sample), cap)

    token: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". sequence: Liu et
    al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"; without the
    cap it is unbiased, but its variance grows exponentially with the length. Truncation trades some of that variance
    for bias: Ionides 2008, "Truncated Importance Sampling".

        old_logprobs, rollout_logprobs: [N] from the trainer and from the engine, with the same weights
        cap: > 0; above exp(20) it has no effect, since ratios are clamped there
    """
    mask = batch.columns["loss_mask"]
    log_ratio: Array = np.zeros(len(mask))
    log_ratio[mask] = old_logprobs[mask].astype(np.float64) - rollout_logprobs[mask]
    if level == "sequence":
        sample_of = batch.sample_of
        log_ratio = np.bincount(sample_of, weights=log_ratio, minlength=len(batch))[sample_of]
    weights = np.minimum(np.exp(np.minimum(log_ratio, MAX_LOG_RATIO)), cap)
    return np.where(mask, weights, 0.0).astype(np.float32)


def correction_metrics(weights: FloatArray, batch: SampleBatch, *, cap: float) -> dict[str, float]:
    """How much `importance_weights` [N] correct, and what that costs; empty if the batch has no loss token.

        weight                           mean over loss tokens; 1 if engine and trainer agree
        truncated, truncated_samples     fraction of loss tokens at the cap, and of samples that have one
        effective, effective_samples     (sum w)^2 / (n sum w^2), the effective sample size as a fraction of n: over
                                         loss tokens, and over samples' mean weights; 1 if all weights are equal

    Kish 1965, "Survey Sampling". Samples without loss tokens are not counted. A weight equal to the cap counts as
    truncated, so with a cap of 1 every token on which both agree does.
    """
    mask = batch.columns["loss_mask"]
    of_tokens = weights[mask].astype(np.float64)
    if not len(of_tokens):
        return {}
    at_cap = of_tokens >= np.float32(cap)
    sample_of = batch.sample_of[mask]
    tokens = np.bincount(sample_of)
    counted = tokens > 0
    of_samples = np.bincount(sample_of, weights=of_tokens)[counted] / tokens[counted]
    return {
        "weight": float(of_tokens.mean()),
        "truncated": float(at_cap.mean()),
        "truncated_samples": float((np.bincount(sample_of, weights=at_cap)[counted] > 0).mean()),
        "effective": _effective(of_tokens),
        "effective_samples": _effective(of_samples),
    }


def _effective(weights: Array) -> float:
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0
