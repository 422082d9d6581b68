"""Importance weights that correct for differences between the engine's policy and the trainer's."""

from __future__ import annotations

from typing import Literal

import numpy as np
from attrs import frozen

from corerl.algorithms.kl import MAX_LOG_RATIO
from corerl.types import Array, BoolArray, FloatArray, SampleBatch


@frozen(kw_only=True, eq=False)
class ImportanceWeights:
    """Weights of the loss tokens of a batch, and which of them a bound has changed."""

    weights: FloatArray  # [N] 0 outside loss tokens
    outside: BoolArray  # [N] loss tokens whose ratio is below the floor or above the cap


def importance_weights(
    old_logprobs: FloatArray,
    rollout_logprobs: FloatArray,
    batch: SampleBatch,
    *,
    level: Literal["token", "sequence", "geometric"],
    floor: float = 0.0,
    cap: float,
    beyond: Literal["truncate", "mask"] = "truncate",
) -> ImportanceWeights:
    """Probability ratios trainer / engine of the sampled tokens, kept between `floor` and `cap`.

        token:      r_t = exp(old_t - rollout_t)
        sequence:   r_t = exp(sum of old_s - rollout_s over the loss tokens s of the sample)
        geometric:  r_t = exp(mean of old_s - rollout_s over the loss tokens s of the sample)

        truncate:   w_t = min(max(r_t, floor), cap)
        mask:       w_t = r_t where floor <= r_t <= cap, else 0

    token, truncated: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; masked
    it is IcePop: Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking
    Model". sequence, truncated and masked: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from
    the Training-Inference Mismatch"; without bounds it is unbiased, but its variance grows exponentially with the
    length. Truncation trades some of that variance for bias: Ionides 2008, "Truncated Importance Sampling". geometric,
    masked: Li and Liu 2025, "Trust Region Optimization via Sequence Masking", part 3 of the same series. A geometric
    mean does not grow with the length, so a band drops long samples no sooner than short ones; it is a filter, not the
    weight that an expectation under the trainer's policy needs.

        old_logprobs, rollout_logprobs: [N] from the trainer and from the engine, with the same weights
        floor, cap: 0 <= floor <= cap; ratios are clamped at exp(20), so a cap above that has no effect
    """
    mask = batch.columns["loss_mask"]
    log_ratio: Array = np.zeros(len(mask))
    log_ratio[mask] = old_logprobs[mask].astype(np.float64) - rollout_logprobs[mask]
    if level != "token":
        row_of = batch.row_of
        per_sample: Array = np.bincount(row_of, weights=log_ratio, minlength=len(batch))
        if level == "geometric":
            per_sample = per_sample / np.maximum(np.bincount(row_of, weights=mask, minlength=len(batch)), 1)
        log_ratio = per_sample[row_of]
    ratios = np.exp(np.minimum(log_ratio, MAX_LOG_RATIO))
    outside = mask & ((ratios < floor) | (ratios > cap))
    bounded = np.clip(ratios, floor, cap) if beyond == "truncate" else np.where(outside, 0.0, ratios)
    return ImportanceWeights(weights=np.where(mask, bounded, 0.0).astype(np.float32), outside=outside)


def correction_metrics(
    found: ImportanceWeights, batch: SampleBatch, *, beyond: Literal["truncate", "mask"]
) -> dict[str, float]:
    """How much `importance_weights` correct, and what that costs; empty if the batch has no loss token.

        weight                           mean over loss tokens; 1 if engine and trainer agree, 0 if all are masked
        truncated, truncated_samples     fraction of loss tokens outside the bounds, and of samples that have one
        masked, masked_samples           the same where these are masked
        effective, effective_samples     (sum w)^2 / (n sum w^2), the effective sample size as a fraction of n: over
                                         loss tokens, and over samples' mean weights; 1 if all weights are equal, 0 if
                                         all are 0

    Kish 1965, "Survey Sampling". n counts what is masked; samples without loss tokens are not counted.
    """
    mask = batch.columns["loss_mask"]
    of_tokens = found.weights[mask].astype(np.float64)
    if not len(of_tokens):
        return {}
    outside, row_of = found.outside[mask], batch.row_of[mask]
    tokens = np.bincount(row_of)
    counted = tokens > 0
    of_samples = np.bincount(row_of, weights=of_tokens)[counted] / tokens[counted]
    name = {"truncate": "truncated", "mask": "masked"}[beyond]
    return {
        "weight": float(of_tokens.mean()),
        name: float(outside.mean()),
        f"{name}_samples": float((np.bincount(row_of, weights=outside)[counted] > 0).mean()),
        "effective": _effective(of_tokens),
        "effective_samples": _effective(of_samples),
    }


def _effective(weights: Array) -> float:
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0
