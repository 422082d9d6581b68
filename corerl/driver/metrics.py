"""Report each rollout step: its metrics, under the names that every tracker shows, its samples, and what makes it teach
less than it could."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from attrs import define, evolve, field

from corerl.algorithms.advantages import spread
from corerl.algorithms.losses import mismatch
from corerl.algorithms.metrics import MetricSum
from corerl.data.packing import count_loss_tokens
from corerl.driver.advantages import TrainBatch
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.engines.fleet import EngineFleet
from corerl.models.tokenizer import special_tokens
from corerl.observability.timing import idle, idle_seconds
from corerl.plan.plan import RolloutPlan
from corerl.plugin.events import StepFinished
from corerl.plugin.spec import ACTOR
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout, truncated_fraction
from corerl.rollout.source import Policies
from corerl.types import FloatArray, IntArray, Metric, Reduction, SampleBatch, TrainResult, offsets_of

STEPS = 3  # in a row
NEARLY_ALL = 0.9  # fraction of a step's groups, or of its samples


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
        "rollout/truncated": truncated_fraction(scored.rollout),
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
    steps that report them, all others are averaged, without means over nothing; any other NaN stays. The gradient norm
    is averaged over applied steps, if any."""
    names = list(dict.fromkeys(name for step in steps for name in step.metrics))
    metrics = {
        # The actor's expert load has a group of its own.
        name if prefix == "train" and name.startswith("moe/") else f"{prefix}/{name}": _over_steps(
            [step.metrics[name] for step in steps if name in step.metrics]
        )
        for name in names
        if not name.startswith("logprob_")  # only meaningful before the first step moves the policy
    }
    norms = [step.grad_norm for step in steps if step.applied] or [step.grad_norm for step in steps]
    metrics[f"{prefix}/grad_norm"] = float(np.mean(norms)) if norms else math.nan
    metrics[f"{prefix}/skipped_steps"] = float(sum(not step.applied for step in steps))
    metrics[f"{prefix}/lr"] = lr
    metrics[f"{prefix}/tokens"] = float(sum(step.tokens for step in steps))
    return metrics


def _over_steps(parts: Sequence[Metric]) -> float:
    known = [part.value for part in parts if part.weight or part.reduction is not Reduction.MEAN]
    over = {Reduction.MAX: np.max, Reduction.MIN: np.min}.get(parts[0].reduction, np.mean)
    return float(over(known)) if known else math.nan


def staleness_metrics(samples: SampleBatch, policies: Policies) -> dict[str, float]:
    """How many policies the loss tokens are behind the newest, which engines hold as training starts. With
    `weights.every` above 1 this is 0 between two updates, however far the trainer has moved.

    staleness             mean over loss tokens
    staleness_max         of the oldest token
    staleness_fraction/S  fraction of loss tokens that are S updates behind
    continued             fraction of samples generated by several versions
    """
    mask = samples.columns["loss_mask"]
    behind = policies.newest - policies.of(samples.columns["versions"][mask])
    if not len(behind):
        return {}
    fractions = np.bincount(behind) / len(behind)
    counts = count_loss_tokens(samples)
    begins = offsets_of(counts)[:-1][counts > 0]
    continued = np.maximum.reduceat(behind, begins) > np.minimum.reduceat(behind, begins)
    return {
        "rollout/staleness": float(behind.mean(dtype=np.float64)),
        "rollout/staleness_max": float(behind.max()),
        **{f"rollout/staleness_fraction/{updates}": float(each) for updates, each in enumerate(fractions) if each},
        "rollout/continued": float(np.count_nonzero(continued) / len(samples)),
    }


def recomputed_mismatch(samples: SampleBatch) -> dict[str, float]:
    """How far trainer and engine disagree on the log-probs of the same tokens, if the trainer recomputed all of them
    before the first optimizer step; see `corerl.algorithms.losses.mismatch`."""
    mask = samples.columns["loss_mask"]
    if not mask.any():
        return {}
    trainer, engine = (torch.as_tensor(samples.columns[name][mask]) for name in ("old_logprobs", "rollout_logprobs"))
    found = MetricSum()
    found.add(mismatch(trainer, engine, torch.ones_like(trainer, dtype=torch.bool)))
    return {f"rollout/{name}": metric.value for name, metric in found.finish().items()}


def first_step_mismatch(first: TrainResult) -> dict[str, float]:
    """Like `recomputed_mismatch`, but over the first optimizer step's part of the batch; empty if a user's own loss
    does not report it."""
    return {f"rollout/{name}": metric.value for name, metric in first.metrics.items() if name.startswith("logprob_")}


def time_metrics(seconds: Mapping[str, float], step_seconds: float, tokens: float) -> dict[str, float]:
    """Seconds by phase, and the batch's sampled tokens per second of the whole step. Discarded samples cost time but
    do not count as tokens."""
    return {
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/step": step_seconds,
        "perf/tokens_per_second": tokens / step_seconds,
    }


# ---- reports ---------------------------------------------------------------------------------------------------------


@define
class InRow:
    """Counts the steps in a row that are all alike in something."""

    _steps: int = 0

    def completed(self, alike: bool) -> bool:
        """Whether this step is the last of STEPS that are so, for the first time."""
        if self._steps == STEPS:
            return False
        self._steps = self._steps + 1 if alike else 0
        return self._steps == STEPS


@define(kw_only=True, eq=False)
class StepNotices:
    """Reads each step of a run, and remembers what is reported only once."""

    unseen: Mapping[int, str] = field(factory=dict)  # special tokens that texts leave out: id -> token; {}: reported
    sampled: bool = True  # by this run, whose settings say when samples are cut off
    _zero: InRow = field(factory=InRow, init=False)  # steps that taught nothing
    _cut_off: InRow = field(factory=InRow, init=False)  # steps whose samples were cut off

    def of(self, scored: ScoredRollout, trained: SampleBatch | None) -> Iterator[str]:
        """`trained`: the samples as the losses read them; None if the step was not for training."""
        if scored.first_failure:
            failed = sum(scored.failures.values())
            yield f"step {scored.step}: {failed} samples failed; the first: {scored.first_failure}"
        yield from self._of_unseen(scored.rollout.batch)
        if self.sampled:
            yield from self._of_cut_off(scored.rollout)
        if trained is not None:
            yield from self._of_zero_advantages(trained)

    def _of_unseen(self, batch: SampleBatch) -> Iterator[str]:
        """That the reward misses tokens that the policy samples; once."""
        found = batch.columns["loss_mask"] & np.isin(batch.tokens, list(self.unseen))
        if found.any():
            token = self.unseen[int(batch.tokens[found][0])]
            self.unseen = {}
            yield (
                f"samples contain special tokens, such as {token!r}, which the reward's text leaves out; set "
                "reward.special_tokens=true if it needs them"
            )

    def _of_cut_off(self, rollout: Rollout) -> Iterator[str]:
        """That nearly all samples of several steps in a row were cut off; once."""
        batch, cut = rollout.batch, truncated_fraction(rollout)
        if batch.columns["loss_mask"].sum() <= len(batch.lengths):
            return  # a choice of one token has no end
        if self._cut_off.completed(cut >= NEARLY_ALL):
            yield (
                f"nearly all samples reached rollout.max_tokens, {STEPS} steps in a row, now {cut:.0%}: what comes "
                "after it is neither scored nor trained on; raise it if answers are to end"
            )

    def _of_zero_advantages(self, samples: SampleBatch) -> Iterator[str]:
        """That several steps in a row taught nothing, as nearly all groups had advantages of 0 alone; once."""
        _, group_of = np.unique(samples.peers, return_inverse=True)
        teach = np.bincount(group_of[samples.row_of], weights=samples.columns["advantages"] != 0) > 0
        zero = int((~teach).sum())
        if len(teach) and self._zero.completed(zero >= NEARLY_ALL * len(teach)):
            yield (
                f"nearly all groups had advantages of 0, {STEPS} steps in a row, now {zero} of {len(teach)}: they "
                "teach nothing; check reward and samples, or use prompts that are sometimes answered right"
            )


def unseen_tokens(plan: RolloutPlan) -> dict[int, str]:
    """The special tokens that the texts of samples leave out, by id, besides those that any tokenizer has and those
    that end samples."""
    tokenizer = plan.tokenizer
    if plan.rewarding.special_tokens:
        return {}
    common = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    known = common | set(plan.params.stop_tokens)
    return {index: token for index, token in special_tokens(tokenizer).items() if index not in known}


@define(kw_only=True, eq=False)
class StepReports:
    """Reports the rollout steps of a run, one after the other."""

    recomputes: bool  # whether the trainer computes all log-probs of a batch before its first optimizer step
    roles: Mapping[str, Role]
    fleet: EngineFleet | None
    residency: Residency
    progress: Progress
    notices: StepNotices
    placeholder: int | None = None  # the token that stands for pictures; None if rows have none

    _step_started: float = field(factory=time.perf_counter)
    # Of that clock, by time.time(); once, so that a step begins where the one before has ended.
    _epoch: float = field(factory=lambda: time.time() - time.perf_counter())

    def report(
        self, scored: ScoredRollout, batch: TrainBatch | None, results: Mapping[str, Sequence[TrainResult]]
    ) -> None:
        """`batch` is None if the step was not for training; `results` are by role."""
        began, self._step_started = self._step_started, time.perf_counter()
        ended = self._step_started
        metrics = {**rollout_metrics(scored, placeholder=self.placeholder), **(batch.metrics if batch else {})}
        tokens = metrics["rollout/tokens"]
        if batch and self.recomputes:
            metrics |= recomputed_mismatch(batch.samples)
        elif ACTOR in results:
            metrics |= first_step_mismatch(results[ACTOR][0])
        for name, steps in results.items():
            role = self.roles[name]
            prefix = "train" if name == ACTOR else name
            metrics |= train_metrics(steps, role.lr.at(role.next_optimizer_step - 1), prefix=prefix)  # of the last step
        metrics |= self.residency.metrics()
        if line := self.residency.settle():
            self.progress.notice(line)
        if results:
            metrics["perf/compilations"] = float(sum(each.compilations for steps in results.values() for each in steps))
        metrics |= time_metrics({**scored.seconds, **self.progress.seconds.take()}, ended - began, tokens)
        engines = self.fleet.names if self.fleet is not None else ()
        waits = idle(self.progress.spans.take(), began, ended, engines=engines)
        metrics |= idle_seconds(waits, engines=len(engines))
        for line in self.notices.of(scored, batch.samples if batch else None):
            self.progress.notice(line)
        samples = scored.rollout.batch
        if batch and np.array_equal(batch.samples.tokens, samples.tokens):  # not of a postprocess that drops rows
            samples = batch.samples
        self.progress.emit(
            StepFinished(
                step=scored.step,
                metrics=metrics,
                shown=scored.shown(),
                samples=scored.samples(),
                idle=[
                    evolve(each, started=self._epoch + each.started, ended=self._epoch + each.ended) for each in waits
                ],
                batch=samples,
            )
        )
