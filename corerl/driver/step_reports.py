"""Report each rollout step: its metrics, its samples, and what makes it teach less than it could."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import define, evolve, field

from corerl.driver.advantages import TrainBatch
from corerl.driver.metrics import (
    first_step_mismatch,
    recomputed_mismatch,
    rollout_metrics,
    time_metrics,
    train_metrics,
    without_spread,
)
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.engines.fleet import EngineFleet
from corerl.models.tokenizer import special_tokens
from corerl.observability.timing import idle, idle_seconds
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.plan import RolloutPlan
from corerl.plugin.events import StepFinished
from corerl.plugin.spec import ACTOR
from corerl.rollout.scored import ScoredRollout
from corerl.types import ROLE, SampleBatch, TrainResult

STEPS = 3  # in a row with equal rewards
NEARLY_ALL = 0.9  # share of a step's groups


@define(kw_only=True, eq=False)
class StepNotices:
    """Reads each step of a run, and remembers what is reported only once."""

    algorithm: AlgorithmPlan
    unseen: Mapping[int, str] = field(factory=dict)  # special tokens that texts leave out: id -> token; {}: reported
    _equal: int = field(default=0, init=False)  # steps in a row whose rewards teach nothing

    def of(self, scored: ScoredRollout) -> Iterator[str]:
        if scored.first_failure:
            failed = sum(scored.failures.values())
            yield f"step {scored.step}: {failed} samples failed; the first: {scored.first_failure}"
        yield from self._of_unseen(scored.rollout.batch)
        if not self.algorithm.asks_frozen:
            yield from self._of_equal_rewards(scored)

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

    def _of_equal_rewards(self, scored: ScoredRollout) -> Iterator[str]:
        """That several steps in a row taught nothing: nearly all groups had equal rewards or, where groups are not
        compared, all samples of each role had; once."""
        samples = scored.rollout.batch
        episodes, _ = samples.episodes
        rewards = scored.rewards[episodes]
        equal, groups = without_spread(rewards, samples.peers[episodes])
        teaches = equal < NEARLY_ALL * groups
        if not self.algorithm.compares:
            same, roles = without_spread(rewards, samples.row_columns.get(ROLE, np.zeros(len(samples)))[episodes])
            teaches = same < roles or len(rewards) == roles  # a sample by itself has no other to equal
        if self._equal < STEPS:
            self._equal = 0 if teaches else self._equal + 1
            if self._equal == STEPS:
                yield (
                    f"nearly all groups had equal rewards, {STEPS} steps in a row, now {equal} of {groups}: nothing is "
                    "learned from these; check the reward and the samples, or use prompts that this model answers "
                    "right sometimes"
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
            metrics |= train_metrics(steps, role.lr(role.next_optimizer_step - 1), prefix=prefix)  # of the last step
        metrics |= self.residency.metrics()
        if line := self.residency.settle():
            self.progress.notice(line)
        if results:
            metrics["perf/compilations"] = float(sum(each.compilations for steps in results.values() for each in steps))
        metrics |= time_metrics({**scored.seconds, **self.progress.seconds.take()}, ended - began, tokens)
        engines = self.fleet.names if self.fleet is not None else ()
        waits = idle(self.progress.spans.take(), began, ended, engines=engines)
        metrics |= idle_seconds(waits, engines=len(engines))
        for line in self.notices.of(scored):
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
