"""Compute the columns that the losses read from rewards and the models' outputs on the samples."""

from __future__ import annotations

import numpy as np
from attrs import evolve, frozen

from corerl.algorithms.advantages import of_episodes, sample_rewards, soft_overlong_penalty
from corerl.algorithms.base import Advantages, Estimate
from corerl.algorithms.corrections import correction_metrics, importance_weights
from corerl.algorithms.kl import token_kl
from corerl.config.schema import KL_ESTIMATOR, AlgorithmConfig
from corerl.errors import DataError
from corerl.rollout.scoring import PartSums, add_parts
from corerl.types import ROLE, TURN_REWARDS, FloatArray, Output, SampleBatch

ROUTED_EXPERTS = Output.ROUTED_EXPERTS.value


@frozen(kw_only=True)
class TrainBatch:
    """A rollout batch that is ready to train on."""

    samples: SampleBatch
    metrics: dict[str, float]
    # What the actor's first optimizer step multiplies the gradients by that its ranks have accumulated already; None:
    # they have none.
    scale_of_accumulated: float | None = None


def compute_advantages(
    samples: SampleBatch,
    rewards: FloatArray,
    estimate: Estimate,
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int,
    credits_turns: bool = False,
) -> TrainBatch:
    """Add the columns that `estimate` computes from the rewards [B] and the columns `old_logprobs`, `ref_logprobs`
    (with a KL penalty) and those of its algorithm's passes; with a correction, `advantages` are weighted by
    `old_logprobs` and `rollout_logprobs`. `credits_turns`: as in `AlgorithmSpec`. The row column `shaped_rewards` [B]
    has each sample's reward after penalties."""
    columns, mask = samples.columns, samples.columns["loss_mask"]
    metrics: dict[str, float] = {}
    if algorithm.overlong == "penalty":
        lengths, buffer = samples.row_columns["response_length"], algorithm.overlong_buffer or 0
        episodes, episode_of = samples.episodes
        penalty = np.zeros(len(episodes), dtype=np.float32)  # that of an episode's longest sample
        np.minimum.at(penalty, episode_of, soft_overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer))
        metrics["rollout/overlong_penalty"] = float(penalty.mean(dtype=np.float64))
        rewards = rewards + penalty[episode_of]
    token_rewards = np.zeros(len(mask), dtype=np.float32)
    if "ref_logprobs" in columns:
        estimator = algorithm.kl_estimator or KL_ESTIMATOR[algorithm.kl_in]
        divergence = token_kl(columns["old_logprobs"], columns["ref_logprobs"], mask, estimator=estimator)
        metrics["train/kl_coef"] = algorithm.kl_coef
        if mask.any():  # otherwise nothing was measured
            metrics["train/kl_reference"] = float(divergence[mask].mean(dtype=np.float64))
        if algorithm.kl_in == "reward":
            token_rewards = -np.float32(algorithm.kl_coef) * divergence
    if credits_turns and TURN_REWARDS in columns:
        token_rewards = token_rewards + columns[TURN_REWARDS]
        rewards = rewards - of_episodes(columns[TURN_REWARDS], samples)

    found = _of_each_role(estimate, samples, rewards, token_rewards)
    advantages, metrics = found.advantages, {**metrics, **found.metrics}
    if algorithm.correction != "none":
        corrected = importance_weights(
            columns["old_logprobs"],
            columns["rollout_logprobs"],
            samples,
            level=algorithm.correction,
            floor=algorithm.correction_floor,
            cap=algorithm.correction_cap,
            beyond=algorithm.correction_beyond,
        )
        weights = correction_metrics(corrected, samples, beyond=algorithm.correction_beyond)
        metrics |= {f"correction/{name}": value for name, value in weights.items()}
        # The policy term is linear in the advantage, and weights are non-negative, so they can be folded in here.
        advantages = advantages * corrected.weights
    samples = samples.with_row_columns(shaped_rewards=sample_rewards(samples, rewards, token_rewards))
    return TrainBatch(samples=samples.with_columns(**found.columns, advantages=advantages), metrics=metrics)


def _of_each_role(
    estimate: Estimate, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray
) -> Advantages:
    """What `estimate` makes of each role's samples by themselves: what one role earns says nothing of another, whose
    baseline and spread differ (Liu et al. 2025, "SPIRAL", role-conditioned advantages). Metrics are means over rows.
    Raises DataError."""
    if ROLE not in samples.row_columns:
        found = estimate(samples, rewards, token_rewards)
        _require_sound(found, samples)
        return found
    roles, role_of = np.unique(samples.row_columns[ROLE], return_inverse=True)
    columns: dict[str, FloatArray] = {}
    sums: PartSums = {}
    for role in range(len(roles)):
        rows, tokens = np.flatnonzero(role_of == role), role_of[samples.row_of] == role
        own = samples.take_rows(rows)
        found = estimate(own, rewards[rows], token_rewards[tokens])
        _require_sound(found, own)
        for name, column in {**found.columns, "advantages": found.advantages}.items():
            columns.setdefault(name, np.zeros(len(tokens), np.float32))[tokens] = column
        sums = add_parts(sums, {name: (value * len(rows), len(rows)) for name, value in found.metrics.items()})
    metrics = {name: value / count for name, (value, count) in sums.items()}
    return Advantages(advantages=columns.pop("advantages"), columns=columns, metrics=metrics)


def _require_sound(found: Advantages, samples: SampleBatch) -> None:
    """Raise DataError for advantages or further columns that could not be trained on."""
    for name, column in {**found.columns, "advantages": found.advantages}.items():
        if np.shape(column) != samples.tokens.shape:
            raise DataError(
                f"the algorithm's {name!r} are of shape {list(np.shape(column))}, wanted [{len(samples.tokens)}], one "
                "for each token"
            )
    if taken := sorted({*samples.columns, "advantages"} & set(found.columns)):
        raise DataError(f"the algorithm returned the further column {taken[0]!r}, which the samples have; rename it")
    if not np.isfinite(found.advantages[samples.columns["loss_mask"]]).all():
        raise DataError("the algorithm's advantages are not finite at all loss tokens; check rewards and divisions")


def replayed(samples: SampleBatch, *, replays: bool, source: str) -> SampleBatch:
    """The samples with the engine's column `routed_experts` if training `replays` it, otherwise without it.

    Raises DataError if the column is needed but missing; `source` is where the samples came from, in words.
    """
    if not replays:
        columns = {name: column for name, column in samples.columns.items() if name != ROUTED_EXPERTS}
        return evolve(samples, columns=columns)
    column = samples.columns.get(ROUTED_EXPERTS)
    if column is None:
        raise DataError(
            f"algorithm.routing_replay: 'engine', and {source} came without {ROUTED_EXPERTS!r}; set it to 'recompute' "
            "(with old_logprobs='recompute') or 'none', or use an engine that reports the experts of each token"
        )
    return samples
