"""Compute the columns that the losses read from rewards and the models' outputs on the samples."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from corerl.algorithms.advantages import at_last_token, broadcast, explained_variance, gae, group_advantages, whiten
from corerl.algorithms.corrections import correction_metrics, importance_weights
from corerl.algorithms.kl import token_kl
from corerl.algorithms.overlong import soft_overlong_penalty
from corerl.config.schema import AlgorithmConfig
from corerl.types import FloatArray, SampleBatch


@frozen(kw_only=True)
class Stamped:
    """A rollout batch that is ready to train on."""

    samples: SampleBatch
    metrics: dict[str, float]
    kl_coef: float = 0.0  # used in this step
    kl: float | None = None  # to the reference policy, mean over loss tokens; None without a reference


def stamp(
    samples: SampleBatch, rewards: FloatArray, algorithm: AlgorithmConfig, *, kl_coef: float, max_tokens: int
) -> Stamped:
    """Add the column `advantages`, and `returns` for a critic, computed from the rewards [B] and the columns
    `old_logprobs`, `rollout_logprobs`, `ref_logprobs` (with a KL penalty) and `values` (with a critic). `kl_coef` is
    the current, possibly adapted coefficient."""
    columns, mask = samples.columns, samples.columns["loss_mask"]
    metrics: dict[str, float] = {}
    kl: float | None = None
    if algorithm.overlong == "penalty":
        lengths = samples.rows["response_length"]
        penalty = soft_overlong_penalty(lengths, max_tokens=max_tokens, buffer=algorithm.overlong_buffer)
        metrics["rollout/overlong_penalty"] = float(penalty.mean(dtype=np.float64))
        rewards = rewards + penalty
    per_token = np.zeros(len(mask), dtype=np.float32)
    if "ref_logprobs" in columns:
        divergence = token_kl(columns["old_logprobs"], columns["ref_logprobs"], mask, estimator=algorithm.kl_estimator)
        metrics["train/kl_coef"] = kl_coef
        if mask.any():  # otherwise nothing was measured, and the coefficient stays
            kl = metrics["train/kl_reference"] = float(divergence[mask].mean(dtype=np.float64))
        if algorithm.kl_in == "reward":
            per_token = -np.float32(kl_coef) * divergence

    added: dict[str, FloatArray] = {}
    if algorithm.name == "ppo":
        critic, values = algorithm.critic, columns["values"]
        per_token = per_token + at_last_token(rewards, samples)
        advantages, returns = gae(per_token, values, samples, gamma=critic.gamma, lam=critic.gae_lambda)
        added["returns"] = returns
        metrics["critic/explained_variance"] = explained_variance(values, returns, mask)
        if critic.whiten:
            advantages = whiten(advantages, mask)
    else:
        penalties = np.bincount(samples.sample_of, weights=per_token, minlength=len(samples))
        penalised = rewards + penalties.astype(np.float32)
        groups = samples.rows["group"]
        advantages = broadcast(group_advantages(penalised, groups, normalize_std=algorithm.normalize_std), samples)
    if algorithm.correction != "none":
        weights = importance_weights(
            columns["old_logprobs"],
            columns["rollout_logprobs"],
            samples,
            level=algorithm.correction,
            cap=algorithm.correction_cap,
        )
        found = correction_metrics(weights, samples, cap=algorithm.correction_cap)
        metrics |= {f"correction/{name}": value for name, value in found.items()}
        # The policy term is linear in the advantage, and weights are non-negative, so they can be folded in here.
        advantages = advantages * weights
    added["advantages"] = advantages
    return Stamped(samples=samples.with_columns(**added), metrics=metrics, kl_coef=kl_coef, kl=kl)
