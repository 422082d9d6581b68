"""The parts of a run on the driver, and the verbs that the loop calls on them."""

from __future__ import annotations

import shlex
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from attrs import asdict, define, evolve, field, frozen

from corerl.algorithms.advantages import without_truncated
from corerl.calls import Future, wait_all
from corerl.driver.advantages import TrainBatch, compute_advantages, replayed
from corerl.driver.checkpoints import DriverPart, Saves
from corerl.driver.engines import Engines
from corerl.driver.groups import RunGroups
from corerl.driver.logprob_check import LogprobCheck, spread_over
from corerl.driver.metrics import StepReports, staleness_metrics
from corerl.driver.progress import Progress
from corerl.driver.rank_recovery import RankRecovery, RestartPoint
from corerl.driver.residency import Residency
from corerl.driver.roles import ReferencePolicy, Role
from corerl.driver.run_dir import require_there
from corerl.driver.sampling import Evaluations, Sampling
from corerl.driver.streamed_step import StreamedStep
from corerl.errors import WorkerDied
from corerl.pictures import PICTURES
from corerl.plan.plan import Plan
from corerl.plan.residency import ACTOR_WEIGHTS, COMPARE, FORWARD, SAMPLE
from corerl.plan.resume import EXPORT
from corerl.plugin.events import RunFinished, RunRewound
from corerl.plugin.spec import ACTOR
from corerl.rollout.recorded import ROLLOUTS, write_rollout
from corerl.rollout.scored import ScoredRollout, postprocessed
from corerl.trainer.group import StoredBatch
from corerl.types import FloatArray, Output, SampleBatch, TrainResult

T = TypeVar("T")


@frozen(kw_only=True)
class Summary:
    """How a run ended."""

    reason: str  # finished or interrupted
    run_dir: Path
    steps_done: int
    evaluation: dict[str, float] = field(factory=dict)  # metrics of the last evaluation


@define(kw_only=True)
class Run:
    """A run's parts and verbs. The loop counts the steps; everything else happens in these methods."""

    plan: Plan  # as the run started: after a resize, `groups.plan` has other processes
    progress: Progress
    reports: StepReports
    roles: Mapping[str, Role]
    engines: Engines | None  # None if nothing is sampled
    reference: ReferencePolicy
    logprob_check: LogprobCheck | None  # None if it is off
    residency: Residency
    sampling: Sampling
    evaluations: Evaluations
    saves: Saves
    recovery: RankRecovery
    groups: RunGroups

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether to stop now."""
        return self.groups.stop.requested and (self._resumes_alike or not self.plan.run.trains)

    @property
    def _resumes_alike(self) -> bool:
        """Whether engines and reference policy have just got these weights, as both do when a run resumes: this step
        can be resumed from. plan/check.py keeps `checkpoint.every` to such steps; the last save may be at another."""
        step, every = self.progress.steps_done, self.plan.algorithm.settings.reference_every
        fresh = not self.plan.run.has_engines or step % self.plan.weights.every == 0
        return fresh and (not every or step % every == 0)

    @property
    def run_dir(self) -> Path:
        return self.plan.start.run_dir

    @property
    def actor(self) -> Role:
        return self.roles[ACTOR]

    @property
    def _trained(self) -> list[str]:
        """The roles that are trained on this step."""
        step = self.progress.steps_done
        return [name for name, role in self.roles.items() if role.loss is not None and step >= role.trained_from]

    # ---- samples ----------------------------------------------------------------------------------------------------

    def rollouts(self) -> Iterator[tuple[ScoredRollout, StreamedStep | None]]:
        """The rollout steps still to do, each when it is wanted: saved if the run keeps them, and postprocessed. Where
        the source streams, ranks train on prompts that arrive early, and what they have done comes with the step."""
        rollout = self.plan.rollout
        while True:
            with self.rewinding_if_ranks_die() as deaths:
                streamed = self._train_on_arrivals()
                scored = self._wait_replacing_engines(self.sampling.source.next())
            if deaths:
                continue
            if scored is None:
                return
            if rollout.settings.save or self.plan.run.mode == "rollout-only":
                write_rollout(self.run_dir / ROLLOUTS, scored)
            if rollout.postprocess is not None:
                scored = postprocessed(scored, rollout.postprocess, name=rollout.settings.postprocess)
            yield scored, streamed

    def _train_on_arrivals(self) -> StreamedStep | None:
        """Compute passes and gradients of the next step's prompts as they arrive; None if they come together."""
        streamed = None
        while arrived := self._wait_replacing_engines(self.sampling.source.arrived()):
            streamed = streamed or StreamedStep(
                step=self.progress.steps_done,
                trained=self.actor if ACTOR in self._trained else None,
                with_passes=self.with_passes,
                with_advantages=self.advantages_of,
                progress=self.progress,
            )
            streamed.add(arrived)
            self.progress.begin("rollout")
        return streamed

    def _wait_replacing_engines(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that may need engines; if none is left, new ones are started."""
        if self.engines is None:
            return self.sampling.loop.run(work)
        return self.engines.serve(work, self.push_weights_and_sleep)

    # ---- do trainer and engines agree? ------------------------------------------------------------------------------

    def check_logprobs(self) -> None:
        """Compare trainer and engines, which hold the same weights, before a step costs anything. Raises
        LogprobMismatch if they compute different log-probs, unless the run only warns of that."""
        if self.logprob_check is None:
            return
        with self.progress.phase("compare"):
            samples = self._sampled_for(self.logprob_check)
        self._compare(self.logprob_check, samples)
        self.push_weights_and_sleep()  # only engines that take turns with the ranks in memory have lost their weights

    def _sampled_for(self, check: LogprobCheck) -> SampleBatch:
        samples = self._wait_replacing_engines(check.sample())
        if self.engines is not None:
            # A resumed run samples for a check at other steps than an uninterrupted one, and its rows go to the same
            # engines all the same.
            self.engines.fleet.forget_prefixes()
        return samples

    def _compare(self, check: LogprobCheck, samples: SampleBatch) -> None:
        """Score samples of the trainer's current weights, as training would, and judge the difference."""
        samples = self._replayed(samples)
        self.residency.enter(COMPARE)
        with self.progress.phase("compare"):
            replay = self.plan.algorithm.settings.routing_replay == "engine"
            passing = self.actor.start_forward(StoredBatch(samples), (Output.LOGPROBS,), replay=replay)
            check.judge(samples, passing.result()[Output.LOGPROBS])

    # ---- from samples to optimizer steps ----------------------------------------------------------------------------

    def prepare(self, scored: ScoredRollout, streamed: StreamedStep | None = None) -> TrainBatch:
        """Everything the losses read, computed by the models before the batch's first optimizer step; of a step that
        is `streamed` they have done so already. Raises LogprobMismatch if a check of log-probs is due, and trainer and
        engines compute different ones."""
        algorithm, samples = self.plan.algorithm, scored.rollout.batch
        check, engines = self.logprob_check, self.engines
        if check is not None and engines is not None and check.due and engines.up_to_date:
            fresh = spread_over(samples, since=engines.policies.since)  # none where sources sample ahead
            self._compare(check, fresh if len(fresh) else self._sampled_for(check))
        samples = self.with_passes(samples) if streamed is None else streamed.completed(samples)
        batch = self.advantages_of(samples, scored.rewards)
        if streamed is not None:
            batch = evolve(batch, scale_of_accumulated=streamed.scale)
        if algorithm.postprocess is not None:
            batch = evolve(batch, samples=algorithm.postprocess(batch.samples))
        if engines is not None:
            batch = evolve(batch, metrics={**staleness_metrics(samples, engines.policies), **batch.metrics})
        return batch

    def with_passes(self, samples: SampleBatch) -> SampleBatch:
        """The samples with the columns that advantages are computed from, once truncated rows are masked, if the run
        says so: passes of actor, reference (log-probs) and critic (values). Where no pass computes `old_logprobs`, they
        are the engine's."""
        algorithm = self.plan.algorithm
        if algorithm.settings.overlong == "mask":
            samples = without_truncated(samples)
        samples = self._replayed(samples)
        samples = samples.with_columns(old_logprobs=samples.columns["rollout_logprobs"])
        if not algorithm.passes:
            return samples
        self.residency.enter(FORWARD)
        stored = StoredBatch(samples)
        passing = {
            each: self.roles[each.role].start_forward(
                stored, tuple(each.columns.values()), snapshot=each.snapshot, replay=each.replay
            )
            for each in algorithm.passes
        }
        with self.progress.phase("forward"):
            for each, found in wait_all(passing).items():
                samples = samples.with_columns(**{name: found[output] for name, output in each.columns.items()})
        return samples

    def advantages_of(self, samples: SampleBatch, rewards: FloatArray) -> TrainBatch:
        """The samples, or those of some prompts, with their advantages."""
        algorithm = self.plan.algorithm
        return compute_advantages(
            samples,
            rewards,
            algorithm.estimate,
            algorithm.settings,
            max_tokens=self.plan.rollout.settings.max_tokens,
            credits_turns=algorithm.credits_turns,
        )

    def _replayed(self, samples: SampleBatch) -> SampleBatch:
        """The samples with the experts that the engine chose, if training replays them."""
        rollout, replays = self.plan.rollout.settings, self.plan.algorithm.settings.routing_replay == "engine"
        source = f"the batches in {rollout.saved!r}" if rollout.saved else f"the engine {rollout.engine!r}"
        return replayed(samples, replays=replays, source=source)

    def optimize(self, batch: TrainBatch) -> dict[str, list[TrainResult]]:
        """Take all optimizer steps of the batch; results by role, in step order, {} if there are no loss tokens. Roles
        train concurrently, unless they take turns in device memory."""
        samples = batch.samples
        if not samples.columns["loss_mask"].any():
            self.progress.notice(f"step {self.progress.steps_done} is skipped: none of its samples has a loss token")
            self._renew_reference()
            return {}
        stored = StoredBatch(samples)
        results: dict[str, list[TrainResult]] = {name: [] for name in self._trained}
        for stage, names in self.residency.turns([*results]).items():
            self.residency.enter(stage)
            with self.progress.phase("train"):
                steps = self._start_training(names, stored, batch)
                for (name, _), result in wait_all(steps).items():
                    results[name].append(result)
        self._renew_reference()
        return {name: steps for name, steps in results.items() if steps}

    def _renew_reference(self) -> None:
        self.reference.renew(self.progress.steps_done + 1, self.residency.enter)  # the loop counts this step later

    def _start_training(
        self, names: Sequence[str], stored: StoredBatch, batch: TrainBatch
    ) -> dict[tuple[str, int], Future[TrainResult]]:
        """Start all optimizer steps of these roles; futures by role and number."""
        steps: dict[tuple[str, int], Future[TrainResult]] = {}
        for name in names:
            role = self.roles[name]
            plans = role.plan_steps(batch.samples, self.progress.steps_done)
            scale = batch.scale_of_accumulated if name == ACTOR else None
            started = role.start_training(stored, plans, self.progress.steps_done, scale_of_accumulated=scale)
            for count, why in (
                (role.steps_of_batch - len(plans), "the batch has fewer groups than that, and groups are not split"),
                (len(plans) - len(started), "their samples have no loss tokens"),
            ):
                if count:
                    where = f"step {self.progress.steps_done}: {count} optimizer steps of {name}"
                    self.progress.notice(f"{where} are skipped: {why}")
            steps |= {(name, index): future for index, future in enumerate(started)}
        return steps

    # ---- ranks that die ---------------------------------------------------------------------------------------------

    def rewinding_if_ranks_die(self) -> AbstractContextManager[Sequence[WorkerDied]]:
        """A context in which ranks may die: the error ends the block, and leaving it restarts all ranks from the newest
        checkpoint, to which `progress` and the source of samples go back: the steps since then are repeated. Yields a
        list, which holds the deaths once the block is left."""
        return self.recovery.around(self._restore)

    def _restore(self, point: RestartPoint) -> None:
        """Go on from a checkpoint, with which the ranks have restarted. A run that only samples takes its weights
        alone, and continues at its own step."""
        trains = self.plan.run.trains
        if not trains:
            point = evolve(point, checkpoint=None, state=self._driver_part().state)
        self.sampling.source.close()
        self.progress.steps_done = point.step
        self.progress.emit(RunRewound(step=point.step))
        self.reference.begin(resumed=bool(point.state))
        self.sampling.restart(point.state, point.checkpoint)
        if self.engines is not None:
            self.engines.mark_outdated()
            self.sampling.source.renumber(self.engines.version + 1 - self.actor.group.loaded_version)
            self.sampling.loop.run(self.engines.fleet.reset())
        self.push_weights_and_sleep()
        if trains:
            self.evaluate()

    # ---- extensions that decide -------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Let extensions change the groups, or stop the run, if another step comes, and a run could resume here."""
        if self.stopping or self.progress.steps_done >= self.plan.run.steps or not self._resumes_alike:
            return
        changed = self.groups.between_steps(lambda: self.saves.for_restart(self._driver_part))
        if ACTOR in changed:
            self.residency.enter(ACTOR_WEIGHTS)
            self.reference.begin(resumed=True)
        if changed and self.engines is not None:
            if ACTOR in changed:
                self.engines.mark_current()
            self.engines.new_rendezvous()
            self.push_weights()

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def push_weights(self) -> None:
        """Update all engines to the actor's weights. Raises WeightUpdateError if an engine cannot be updated.

        Does nothing if engines already hold these weights, or in steps that weights.every skips."""
        if self.engines is None or not self._push_due(self.engines):
            return
        source, new = self.sampling.source, not self.engines.up_to_date
        self.engines.update(source.updating if source.overlaps else None)
        if new and self.logprob_check is not None:
            self.logprob_check.policy_sent()

    def push_weights_and_sleep(self) -> None:
        """Push weights outside of a step. Engines that are new or have lost their weights make a push due whatever the
        schedule says, and so others start in the place of those that have died."""
        self.push_weights()
        self.sleep_ranks()

    def _push_due(self, engines: Engines) -> bool:
        # Engines that slept, or are new, hold no weights; without any, no engine samples.
        if engines.changes_sent is None or not engines.fleet.all_serve:
            return True
        due = self.progress.steps_done % self.plan.weights.every == 0 or self.evaluations.any_due
        return due and not engines.up_to_date

    def sleep_ranks(self) -> None:
        """After the last verb that uses ranks: if they share devices with engines (else nothing happens), they sleep
        from now on, so that engines can sample. Each verb wakes what it reads, and then the engines sleep until new
        weights are pushed."""
        self.residency.enter(SAMPLE)

    # ---- reports and checkpoints ------------------------------------------------------------------------------------

    def report_step(
        self, scored: ScoredRollout, batch: TrainBatch | None, results: Mapping[str, Sequence[TrainResult]]
    ) -> None:
        """Report a rollout step, which is done: ranks and engines may restart as often as before again, and may stay in
        memory if they were seen to fit. `batch` is None if it was not for training."""
        require_there(self.run_dir)
        if self.engines is not None:
            self.engines.fleet.step_done()
        self.recovery.step_done()
        self.reports.report(scored, batch, results)

    def evaluate(self, *, always: bool = False) -> None:
        """Evaluate on the sets of held-out prompts that are due, or on all."""
        self.evaluations.run(self._wait_replacing_engines, always=always)
        self.progress.begin("rollout" if self.sampling.sampler else "reading")

    def save(self) -> None:
        """Commit a checkpoint that has been written; start a new one if due."""
        with self.progress.seconds("save"), self.progress.spans("save"):
            last = self.progress.steps_done >= self.plan.run.steps or self.stopping
            self.saves.after_step(self._driver_part, last=last, resumable=self._resumes_alike)

    def _driver_part(self) -> DriverPart:
        schedules = {name: asdict(role.decay_start) for name, role in self.roles.items() if role.decay_start}
        state = {
            "rollout_step": self.progress.steps_done,
            **({"schedules": schedules} if schedules else {}),
            "source": self.sampling.source.position,
            **({"data": self.plan.rollout.prompts.record} if self.plan.run.has_engines else {}),
            "config": self.groups.plan.record,
            "before": [shown.record() for shown in self.evaluations.before],
        }
        return DriverPart(state=state, write=self.sampling.source.save)

    def finish(self) -> Summary:
        """Save what is not saved yet, export, and report how the run ended."""
        require_there(self.run_dir)
        # A stop request during the last step has nothing left to stop.
        done = self.progress.steps_done >= self.plan.run.steps or self.plan.run.mode == "eval"
        reason = "interrupted" if self.groups.stop.requested and not done else "finished"
        artifacts = {"run directory": str(self.run_dir)}
        if any(shown.pictures for shown in self.evaluations.after):
            artifacts["pictures"] = str(self.run_dir / PICTURES)
        if self.plan.run.mode == "rollout-only":
            artifacts["rollouts"] = str(self.run_dir / ROLLOUTS)
        if self.plan.run.trains:
            artifacts |= self._finish_training(export=self.plan.checkpoint.export and reason == "finished")
        if reason == "interrupted" and self.plan.run.trains:
            resumed = shlex.quote(f"run.dir={self.run_dir}")
            artifacts["to go on"] = f"the same command with {resumed} checkpoint.resume=auto"
        self.progress.emit(
            RunFinished(
                reason=reason,
                steps_done=self.progress.steps_done,
                seconds=self.progress.elapsed,
                before=self.evaluations.before,
                after=self.evaluations.after,
                artifacts=artifacts,
            )
        )
        return Summary(
            reason=reason,
            run_dir=self.run_dir,
            steps_done=self.progress.steps_done,
            evaluation=self.evaluations.metrics,
        )

    def _finish_training(self, *, export: bool) -> dict[str, str]:
        """Save and export; returns the paths of the results by kind."""
        self.progress.begin("saving")
        newest = self.saves.finish(self._driver_part)
        if newest is None:
            return {}
        artifacts = {"checkpoint": str(newest)}
        if export:
            from corerl.driver.export import export as write_model

            self.progress.begin("exporting")
            target = self.run_dir / EXPORT
            artifacts["model"] = str(write_model(newest, target, replace=True, notify=self.progress.notice))
        return artifacts
