"""Compute the columns that the losses read from rewards and the models' outputs on the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen

from corerl.algorithms.advantages import broadcast
from corerl.algorithms.base import Advantages
from corerl.algorithms.corrections import correction_metrics, importance_weights
from corerl.algorithms.kl import token_kl
from corerl.algorithms.overlong import soft_overlong_penalty
from corerl.config.functions import imported
from corerl.config.schema import AlgorithmConfig
from corerl.errors import DataError
from corerl.messages import one_line
from corerl.types import FloatArray, SampleBatch

# (samples, rewards [B], rewards of tokens [N]) -> advantages, as `Algorithm.advantages`
Estimate: TypeAlias = Callable[[SampleBatch, FloatArray, FloatArray], Advantages]
Postprocess: TypeAlias = Callable[[SampleBatch], SampleBatch]


@frozen(kw_only=True)
class TrainBatch:
    """A rollout batch that is ready to train on."""

    samples: SampleBatch
    metrics: dict[str, float]
    kl_coef: float = 0.0  # used in this step
    kl: float | None = None  # to the reference policy, mean over loss tokens; None without a reference


def compute_advantages(
    samples: SampleBatch,
    rewards: FloatArray,
    estimate: Estimate,
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
    max_tokens: int,
) -> TrainBatch:
    """Add the columns that `estimate` computes from the rewards [B] and the columns `old_logprobs`, `ref_logprobs`
    (with a KL penalty) and those of its algorithm's passes; with a correction, `advantages` are weighted by
    `old_logprobs` and `rollout_logprobs`. `kl_coef` is the current, possibly adapted coefficient."""
    columns, mask = samples.columns, samples.columns["loss_mask"]
    metrics: dict[str, float] = {}
    kl: float | None = None
    if algorithm.overlong == "penalty":
        lengths, buffer = samples.rows["response_length"], algorithm.overlong_buffer or 0
        penalty = soft_overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer)
        metrics["rollout/overlong_penalty"] = float(penalty.mean(dtype=np.float64))
        rewards = rewards + penalty
    token_rewards = np.zeros(len(mask), dtype=np.float32)
    if "ref_logprobs" in columns:
        divergence = token_kl(columns["old_logprobs"], columns["ref_logprobs"], mask, estimator=algorithm.kl_estimator)
        metrics["train/kl_coef"] = kl_coef
        if mask.any():  # otherwise nothing was measured, and the coefficient stays
            kl = metrics["train/kl_reference"] = float(divergence[mask].mean(dtype=np.float64))
        if algorithm.kl_in == "reward":
            token_rewards = -np.float32(kl_coef) * divergence

    found = estimate(samples, rewards, token_rewards)
    _require_sound(found, samples)
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
        told = correction_metrics(corrected, samples, beyond=algorithm.correction_beyond)
        metrics |= {f"correction/{name}": value for name, value in told.items()}
        # The policy term is linear in the advantage, and weights are non-negative, so they can be folded in here.
        advantages = advantages * corrected.weights
    return TrainBatch(
        samples=samples.with_columns(**found.columns, advantages=advantages), metrics=metrics, kl_coef=kl_coef, kl=kl
    )


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


def users_estimate(name: str) -> Estimate:
    """The function `algorithm.advantages` = 'module:function'. It is called like `Algorithm.advantages`, and returns
    advantages of samples [B] or of tokens [N]. Raises ConfigError if it cannot be imported; calling it raises DataError
    if it returns anything else or raises."""
    function = imported(name, setting="algorithm.advantages")

    def estimate(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        try:
            found: Any = np.asarray(function(samples, rewards, token_rewards), dtype=np.float32)
        except Exception as error:
            raise DataError(f"algorithm.advantages: {name!r} raised {one_line(error)}") from error
        sizes = [(len(samples),), (len(samples.tokens),)]
        mask = samples.columns["loss_mask"]
        if found.shape not in sizes:
            raise DataError(
                f"algorithm.advantages: {name!r} returned an array of shape {list(found.shape)}, wanted "
                f"[{len(samples)}], a number of each sample, or [{len(samples.tokens)}], of each token"
            )
        per_token = broadcast(found, samples) if found.shape == sizes[0] else np.where(mask, found, np.float32(0.0))
        if not np.isfinite(per_token).all():
            raise DataError(f"algorithm.advantages: {name!r} returned advantages that are not finite")
        return Advantages(advantages=per_token)

    return estimate


def users_postprocess(name: str) -> Postprocess:
    """The function `algorithm.postprocess` = 'module:function', which maps samples with all columns to those to train
    on. Raises ConfigError if it cannot be imported; calling it raises DataError if it raises or returns anything else
    than samples of which some have a loss token, with finite advantages there."""
    function, setting = imported(name, setting="algorithm.postprocess"), f"algorithm.postprocess: {name!r}"

    def postprocess(samples: SampleBatch) -> SampleBatch:
        try:
            found: Any = function(samples)
        except Exception as error:
            raise DataError(f"{setting} raised {one_line(error)}") from error
        if not isinstance(found, SampleBatch):
            what = "None" if found is None else f"a {type(found).__name__}"
            raise DataError(f"{setting} returned {what}, wanted a corerl.types.SampleBatch; return the samples")
        if missing := sorted(set(samples.columns) - set(found.columns)):
            raise DataError(f"{setting} returned samples without the column {missing[0]!r}; keep it")
        mask = found.columns["loss_mask"]
        if not mask.any():
            raise DataError(f"{setting} returned samples without a loss token; keep some")
        if not np.isfinite(found.columns["advantages"][mask]).all():
            raise DataError(f"{setting} returned advantages that are not finite")
        return found

    return postprocess
