"""Compute a rollout step's metrics, under the names that every tracker shows."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from corerl.algorithms.advantages import spread
from corerl.algorithms.losses import TensorMetric, mismatch
from corerl.algorithms.metrics import MetricSum
from corerl.data.packing import count_loss_tokens
from corerl.observability.timing import Span
from corerl.plugin.events import Idle
from corerl.rollout.scored import ScoredRollout
from corerl.types import FloatArray, IntArray, Metric, Reduction, SampleBatch, TrainResult, offsets_of

RANKS = "ranks"
SCORING = "scoring"  # the span in which rewards are computed
# Phases of the driver in which ranks work, and those in which engines get their weights or change their memory.
OF_RANKS = frozenset({"compare", "forward", "train", "update_weights", "sleep", "wake_up", "save"})
OF_WEIGHTS = frozenset({"update_weights", "hold", "sleep", "wake_up", "replace"})


def rollout_metrics(scored: ScoredRollout) -> dict[str, float]:
    """Metrics of the samples before training."""
    rows = scored.rollout.batch.rows
    episodes, episode_of = scored.rollout.batch.episodes
    rewards = scored.rewards[episodes]
    equal, groups = without_spread(rewards, rows["group"][episodes])
    metrics = {
        "rollout/reward": float(rewards.mean(dtype=np.float64)),
        "rollout/reward_std": float(rewards.std(dtype=np.float64)),
        "rollout/response_length": float(rows["response_length"].mean()),
        "rollout/truncated": float((np.bincount(episode_of, weights=rows["truncated"]) > 0).mean()),
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
        _under(prefix, name): _over_steps([step.metrics[name] for step in steps if name in step.metrics])
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


def _under(prefix: str, name: str) -> str:
    """A metric's name; the actor's expert load has a group of its own."""
    return name if prefix == "train" and name.startswith("moe/") else f"{prefix}/{name}"


def compilations(results: Mapping[str, Sequence[TrainResult]]) -> dict[str, float]:
    """How many graphs the ranks compiled in this rollout step, over all roles."""
    if not results:
        return {}
    return {"perf/compilations": float(sum(len(each.compilations) for steps in results.values() for each in steps))}


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


def staleness_metrics(samples: SampleBatch, version: int) -> dict[str, float]:
    """How many weight updates the loss tokens are behind `version`, which engines hold as training starts. With
    `weights.every` above 1 this is 0 between two updates, however far the trainer has moved.

    staleness             mean over loss tokens
    staleness_max         of the oldest token
    staleness_share/S     share of loss tokens that are S updates behind
    continued             share of samples generated by several versions
    """
    mask = samples.columns["loss_mask"]
    behind = version - samples.columns["versions"][mask]
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


def idle(spans: Sequence[Span], began: float, ended: float, *, engines: Sequence[str]) -> list[Idle]:
    """When the ranks, which work together, and each engine did nothing between `began` and `ended`, by the clock of
    `spans`, among which those of an engine have its name. The engines are those of the step's end: one that came in
    the step is idle until then.

    Ranks do nothing without a verb, and wait for
        samples   of engines
        rewards   while no engine samples
        driver    for anything else
    An engine does nothing without a request, and no update of weights, and waits for
        longest   samples of another engine
        rewards   while no engine samples
        training  of ranks
        driver    for anything else
    """
    changes = [(began, 0, ""), (ended, 0, "")]
    for span in spans:
        low, high = max(span.began, began), min(span.ended, ended)
        if low < high:
            changes += [(low, 1, span.name), (high, -1, span.name)]
    found: list[Idle] = []
    active: Counter[str] = Counter()
    waiting: dict[str, tuple[str, float]] = {}  # who -> for what, and since when
    for at, together in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        for _, change, name in together:
            active[name] += change
        causes = _causes({each for each, count in active.items() if count}, engines) if at < ended else {}
        for who in (RANKS, *engines):
            cause, since = waiting.get(who, ("", at))
            if cause != causes.get(who, ""):
                if cause:
                    found.append(Idle(who=who, waits_for=cause, started=since, ended=at))
                waiting[who] = causes.get(who, ""), at
    return found


def idle_seconds(found: Iterable[Idle], *, engines: int) -> dict[str, float]:
    """Seconds of a step by cause, and in all: as idle/ranks/..., and as idle/engines/..., means over the engines."""
    seconds = defaultdict(float, {"idle/ranks/total": 0.0, **({"idle/engines/total": 0.0} if engines else {})})
    for each in found:
        kind, share = (RANKS, 1.0) if each.who == RANKS else ("engines", 1.0 / engines)
        for name in ("total", each.waits_for):
            seconds[f"idle/{kind}/{name}"] += share * (each.ended - each.started)
    return dict(seconds)


def _causes(active: set[str], engines: Sequence[str]) -> Mapping[str, str]:
    """What each who does nothing waits for, while these spans are open."""
    busy = active.intersection(engines)
    shared = "rewards" if SCORING in active else "driver"
    causes = {}
    if not active & OF_RANKS:
        causes[RANKS] = "samples" if busy else shared
    if not active & OF_WEIGHTS:
        cause = "longest" if busy else "training" if active & OF_RANKS else shared
        causes |= {each: cause for each in engines if each not in busy}
    return causes
