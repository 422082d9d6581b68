"""Compute a rollout step's metrics, under the names that every tracker shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from corerl.algorithms.advantages import spread
from corerl.algorithms.losses import TensorMetric, mismatch
from corerl.algorithms.metrics import MetricSum
from corerl.data.packing import count_loss_tokens
from corerl.rollout.scored import ScoredRollout, truncated_share
from corerl.rollout.source import Policies
from corerl.types import FloatArray, IntArray, Metric, Reduction, SampleBatch, TrainResult, offsets_of


def rollout_metrics(scored: ScoredRollout, *, placeholder: int | None = None) -> dict[str, float]:
    """Metrics of the samples before training. `placeholder`: the token that stands for pictures, where rows may have
    some."""
    rows = scored.rollout.batch.row_columns
    episodes, episode_of = scored.rollout.batch.episodes
    rewards = scored.rewards[episodes]
    equal, groups = without_spread(rewards, scored.rollout.batch.peers[episodes])
    metrics = {
        "rollout/reward": float(rewards.mean(dtype=np.float64)),
        "rollout/reward_std": float(rewards.std(dtype=np.float64)),
        "rollout/response_length": float(rows["response_length"].mean()),
        "rollout/truncated": truncated_share(scored.rollout),
        "rollout/tokens": float(rows["response_length"].sum()),
    }
    if groups < len(rewards):  # else no sample has another to differ from
        metrics["rollout/groups_without_spread"] = equal / groups
    if "turns" in rows:
        metrics["rollout/turns"] = float(rows["turns"].sum() / len(episodes))
        metrics["rollout/rows"] = len(episode_of) / len(episodes)
        metrics["rollout/span"] = float(rows["span"].mean())
    metrics |= {f"reward/{name}": value / count for name, (value, count) in scored.parts.items()}
    if scored.failures:
        metrics["rollout/failed"] = float(sum(scored.failures.values()))
    metrics |= {f"rollout/{name}": float(count) for name, count in scored.counts.items()}
    if placeholder is not None:
        batch = scored.rollout.batch
        sampled = batch.columns["loss_mask"] & (batch.tokens == placeholder)
        metrics["rollout/placeholders"] = float((np.bincount(batch.row_of, weights=sampled) > 0).mean())
    if scored.exact_match is not None:
        metrics["rollout/exact_match"] = scored.exact_match
    return metrics


def without_spread(rewards: FloatArray, groups: IntArray) -> tuple[int, int]:
    """How many groups have equal rewards, and how many groups there are; rewards and group numbers are [B]. Numbers
    may be missing: a user's function may have dropped samples."""
    _, numbered = np.unique(groups, return_inverse=True)
    differ = spread(rewards, numbered)
    return int((~differ).sum()), len(differ)


def train_metrics(steps: Sequence[TrainResult], lr: float, *, prefix: str = "train") -> dict[str, float]:
    """Metrics of one role's optimizer steps on one rollout batch. MAX and MIN metrics keep their reduction over the
    steps that report them, all others are averaged. The gradient norm is averaged over applied steps, if any."""
    names = list(dict.fromkeys(name for step in steps for name in step.metrics))
    metrics = {
        # The actor's expert load has a group of its own.
        name if prefix == "train" and name.startswith("moe/") else f"{prefix}/{name}": _over_steps(
            [step.metrics[name] for step in steps if name in step.metrics]
        )
        for name in names
        if not name.startswith("logprob_")  # only meaningful before the first step moves the policy
    }
    metrics[f"{prefix}/grad_norm"] = _mean(
        [step.grad_norm for step in steps if step.applied] or [step.grad_norm for step in steps]
    )
    metrics[f"{prefix}/skipped_steps"] = float(sum(not step.applied for step in steps))
    metrics[f"{prefix}/lr"] = lr
    metrics[f"{prefix}/tokens"] = float(sum(step.tokens for step in steps))
    return metrics


def _over_steps(parts: Sequence[Metric]) -> float:
    match parts[0].reduction:
        case Reduction.MAX:
            return max(part.value for part in parts)
        case Reduction.MIN:
            return min(part.value for part in parts)
        case _:
            return _mean([part.value for part in parts])


def _mean(values: Sequence[float]) -> float:
    """The mean without NaNs, each of which is a mean over nothing; NaN if nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def staleness_metrics(samples: SampleBatch, policies: Policies) -> dict[str, float]:
    """How many policies the loss tokens are behind the newest, which engines hold as training starts. With
    `weights.every` above 1 this is 0 between two updates, however far the trainer has moved.

    staleness             mean over loss tokens
    staleness_max         of the oldest token
    staleness_share/S     share of loss tokens that are S updates behind
    continued             share of samples generated by several versions
    """
    mask = samples.columns["loss_mask"]
    behind = policies.newest - policies.of(samples.columns["versions"][mask])
    if not len(behind):
        return {}
    shares = np.bincount(behind) / len(behind)
    counts = count_loss_tokens(samples)
    begins = offsets_of(counts)[:-1][counts > 0]
    continued = np.maximum.reduceat(behind, begins) > np.minimum.reduceat(behind, begins)
    return {
        "rollout/staleness": float(behind.mean(dtype=np.float64)),
        "rollout/staleness_max": float(behind.max()),
        **{f"rollout/staleness_share/{updates}": float(share) for updates, share in enumerate(shares) if share},
        "rollout/continued": float(np.count_nonzero(continued) / len(samples)),
    }


def recomputed_mismatch(samples: SampleBatch) -> dict[str, float]:
    """How far trainer and engine disagree on the log-probs of the same tokens, if the trainer recomputed all of them
    before the first optimizer step; see `corerl.algorithms.losses.mismatch`."""
    mask = samples.columns["loss_mask"]
    if not mask.any():
        return {}
    trainer, engine = (torch.as_tensor(samples.columns[name][mask]) for name in ("old_logprobs", "rollout_logprobs"))
    return _mismatch(mismatch(trainer, engine, torch.ones_like(trainer, dtype=torch.bool)))


def first_step_mismatch(first: TrainResult) -> dict[str, float]:
    """Like `recomputed_mismatch`, but over the first optimizer step's part of the batch; empty if a user's own loss
    does not report it."""
    return {f"rollout/{name}": metric.value for name, metric in first.metrics.items() if name.startswith("logprob_")}


def _mismatch(metrics: Mapping[str, TensorMetric]) -> dict[str, float]:
    found = MetricSum()
    found.add(metrics)
    return {f"rollout/{name}": metric.value for name, metric in found.finish().items()}


def time_metrics(seconds: Mapping[str, float], step_seconds: float, tokens: float) -> dict[str, float]:
    """Seconds by phase, and the batch's sampled tokens per second of the whole step. Discarded samples cost time but
    do not count as tokens."""
    return {
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/step": step_seconds,
        "perf/tokens_per_second": tokens / step_seconds,
    }
