"""The parts of a run on the driver, and the verbs that the loop calls on them."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import Factory, asdict, define, evolve, field, frozen

from corerl.algorithms.kl import adapted_coefficient
from corerl.algorithms.overlong import without_truncated
from corerl.calls import Future, wait_all
from corerl.driver.advantages import TrainBatch, compute_advantages, replayed
from corerl.driver.checkpoints import Checkpoints, MemoryCheckpoints
from corerl.driver.control import Control
from corerl.driver.logprob_check import LogprobCheck
from corerl.driver.metrics import (
    compilations,
    first_step_mismatch,
    idle,
    idle_seconds,
    recomputed_mismatch,
    rollout_metrics,
    staleness_metrics,
    time_metrics,
    train_metrics,
)
from corerl.driver.progress import Progress
from corerl.driver.recovery import Recovery, RestartPoint
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.driver.run_dir import require_there
from corerl.driver.sampling import Sampling
from corerl.driver.snapshots import Snapshots
from corerl.driver.step_notices import StepNotices
from corerl.driver.stop import StopRequest
from corerl.driver.streamed_step import StreamedStep
from corerl.driver.updates import WeightUpdates
from corerl.engines.fleet import EngineFleet
from corerl.errors import ResizeFailed, SaveFailed
from corerl.plan.plan import Plan
from corerl.plan.residency import COMPARE, FORWARD, REST, SAMPLE, saving
from corerl.plan.resume import EXPORT
from corerl.plugin.events import Evaluated, RunFinished, RunRewound, SampleShown, StepFinished
from corerl.plugin.spec import ACTOR
from corerl.rollout.evaluation import EvalSet, evaluate
from corerl.rollout.recorded import ROLLOUTS, write_rollout
from corerl.rollout.scored import ScoredRollout, postprocessed
from corerl.trainer.shared import SharedBatch, share
from corerl.types import FloatArray, LossSpec, Output, SampleBatch, TrainResult

T = TypeVar("T")


def answers_in(state: Mapping[str, Any]) -> tuple[SampleShown, ...]:
    """The first evaluation's answers, from a checkpoint's state."""
    return tuple(SampleShown(**shown) for shown in state.get("before", []))


def _questions(answers: Sequence[SampleShown]) -> list[tuple[str, str]]:
    return [(shown.prompt, shown.answer) for shown in answers]


@frozen(kw_only=True)
class Summary:
    """How a run ended."""

    reason: str  # finished or interrupted
    run_dir: Path
    steps_done: int
    evaluation: dict[str, float] = field(factory=dict)  # metrics of the last evaluation


@define(kw_only=True)
class Run:
    """A run's parts and verbs. The loop advances the counters; everything else happens in these methods."""

    plan: Plan
    progress: Progress
    notices: StepNotices
    stop: StopRequest
    roles: Mapping[str, Role]
    updates: WeightUpdates | None  # of the engines' weights; None if nothing is sampled
    snapshots: Snapshots  # of the actor
    logprob_check: LogprobCheck | None  # None if it is off
    residency: Residency
    sampling: Sampling
    checkpoints: Checkpoints
    memory: MemoryCheckpoints | None = None
    restarts: Recovery
    control: Control

    # algorithm.kl_coef, as adapted so far
    kl_coef: float = field(default=Factory(lambda self: self._kl_coef_in(self.plan.start.state), takes_self=True))

    _step_started: float = field(factory=time.perf_counter)
    # Of that clock, by time.time(); once, so that a step begins where the one before has ended.
    _epoch: float = field(factory=lambda: time.time() - time.perf_counter())
    _pushed_at: int | None = None  # the actor's optimizer step whose weights the engines hold
    # Of the first evaluation; a resumed run reads it from its checkpoint.
    _before: tuple[SampleShown, ...] = field(
        default=Factory(lambda self: answers_in(self.plan.start.state) if self.plan.run.trains else (), takes_self=True)
    )
    _after: tuple[SampleShown, ...] = ()
    _evaluation: dict[str, float] = field(factory=dict)
    _streamed: StreamedStep | None = None  # the step that is sampled, if its prompts arrive one by one

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether to stop now."""
        return self.stop.requested and self._resumable

    @property
    def _resumable(self) -> bool:
        """Whether engines have just got new weights, and the reference policy is renewed, as both are when a run
        resumes."""
        step, every = self.progress.step, self.plan.algorithm.settings.reference_every
        fresh = not self.plan.run.samples or step % self.plan.weights.every == 0
        return fresh and (not every or step % every == 0)

    @property
    def actor(self) -> Role:
        return self.roles[ACTOR]

    def _kl_coef_in(self, state: Mapping[str, Any]) -> float:
        """The coefficient in a checkpoint's state, if it is adapted; otherwise the config's."""
        settings = self.plan.algorithm.settings
        return float(state.get("kl_coef", settings.kl_coef)) if settings.kl_target else settings.kl_coef

    # ---- samples ----------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[ScoredRollout]:
        """The rollout steps still to do, each when it is wanted: written down if the run keeps them, before anything
        uses them, and postprocessed."""
        rollout = self.plan.rollout
        while True:
            scored = None
            with self.recovery() as fine:
                scored = self._next()
            if not fine():
                continue
            if scored is None:
                return
            if rollout.settings.save or self.plan.run.mode == "rollout-only":
                write_rollout(self.plan.start.run_dir / ROLLOUTS, scored)
            if rollout.postprocess is not None:
                scored = postprocessed(scored, rollout.postprocess, name=rollout.settings.postprocess)
            yield scored

    def _next(self) -> ScoredRollout | None:
        """The next rollout step; training has begun with those of its prompts that came first, if they come singly."""
        self._streamed = None  # that of the step before
        if self.sampling.source.streams:
            trains = self.actor.loss is not None and self.progress.step >= self.actor.first_step
            self._streamed = StreamedStep(
                step=self.progress.step,
                training=(self.actor, self.loss_of(self.actor, self.kl_coef)) if trains else None,
                with_logprobs=self.with_logprobs,
                with_advantages=self.advantages_of,
                progress=self.progress,
            )
            while arrived := self._served(self.sampling.source.arrived()):
                self._streamed.add(arrived)
                self.progress.begin("rollout")
        return self._served(self.sampling.source.next())

    def _served(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that may need engines; if none is left, new ones are started."""
        if self.updates is None:
            return self.sampling.loop.run(work)
        fleet, future = self.updates.fleet, self.sampling.loop.begin(work)
        try:
            while not fleet.wait(future):
                with fleet.replacing():
                    self.ensure_serving(force=True)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ---- do trainer and engines agree? ------------------------------------------------------------------------------

    def check_logprobs(self) -> None:
        """Compare trainer and engines, which hold the same weights, before a step costs anything. Raises
        LogprobMismatch if they compute different log-probs, unless the run only warns of that."""
        if self.logprob_check is None:
            return
        with self.progress.phase("compare"):
            samples = self._served(self.logprob_check.sample())
        with self.training():
            self._compare(self.logprob_check, samples)
            self.push_weights()  # only engines that take turns with the ranks in memory have lost them

    def _compare(self, check: LogprobCheck, samples: SampleBatch) -> None:
        """Score samples of the trainer's current weights, as training would, and judge the difference."""
        samples = self._replayed(samples)
        self.residency.enter(COMPARE)
        with self.progress.phase("compare"):
            replay = self.plan.algorithm.settings.routing_replay == "engine"
            passing = self.actor.start_forward(share(samples), samples, (Output.LOGPROBS,), replay=replay)
            check.judge(samples, passing.result()[Output.LOGPROBS])

    # ---- from samples to optimizer steps ----------------------------------------------------------------------------

    def with_advantages(self, scored: ScoredRollout) -> TrainBatch:
        """Add everything the losses read, computed by the models before the batch's first optimizer step."""
        algorithm, samples = self.plan.algorithm, scored.rollout.batch
        settings = algorithm.settings
        if self.logprob_check is not None and self.logprob_check.due and self._pushed_at == self.actor.optimizer_step:
            fresh = self.logprob_check.choose(samples)
            self._compare(self.logprob_check, fresh if len(fresh) else self._served(self.logprob_check.sample()))
        samples = self.with_logprobs(samples) if self._streamed is None else self._streamed.whole(samples)
        batch = self.advantages_of(samples, scored.rewards)
        if algorithm.postprocess is not None:
            batch = evolve(batch, samples=algorithm.postprocess(batch.samples))
        if self.updates is not None:
            versions = self.updates.weights_of(np.append(samples.columns["versions"], self.updates.version - 1))
            staleness = staleness_metrics(samples.with_columns(versions=versions[:-1]), int(versions[-1]))
            batch = evolve(batch, metrics={**staleness, **batch.metrics})
        if settings.kl_target and batch.kl is not None:
            self.kl_coef = adapted_coefficient(
                self.kl_coef,
                batch.kl,
                target=settings.kl_target,
                horizon=settings.kl_horizon,
                samples=len(samples.episodes[0]),
            )
        return batch

    def with_logprobs(self, samples: SampleBatch) -> SampleBatch:
        """The samples with all columns that advantages are computed from."""
        algorithm = self.plan.algorithm
        if algorithm.settings.overlong == "mask":
            samples = without_truncated(samples)
        samples = self._replayed(samples)
        samples = samples.with_columns(old_logprobs=samples.columns["rollout_logprobs"])
        if not algorithm.passes:
            return samples
        self.residency.enter(FORWARD)
        shared = share(samples)
        passing = {
            each: self.roles[each.role].start_forward(
                shared,
                samples,
                tuple(each.columns.values()),
                weights=self.snapshots.name_of(each.weights),
                replay=each.replay,
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
            kl_coef=self.kl_coef,
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
            self.progress.notice(f"step {self.progress.step} is skipped: none of its samples has a loss token")
            self._renew_reference()
            return {}
        shared = share(samples)
        training = [
            name for name, role in self.roles.items() if role.loss is not None and self.progress.step >= role.first_step
        ]
        results: dict[str, list[TrainResult]] = {name: [] for name in training}
        for stage, names in self.residency.turns(training).items():
            self.residency.enter(stage)
            with self.progress.phase("train"):
                steps = self._start_training(names, shared, batch)
                for (name, _), result in wait_all(steps).items():
                    results[name].append(result)
        self._renew_reference()
        return {name: steps for name, steps in results.items() if steps}

    def _renew_reference(self) -> None:
        if self.snapshots.renews(self.progress.step + 1):
            self.residency.enter(FORWARD)
            self.snapshots.renew()

    def _start_training(
        self, names: Sequence[str], shared: SharedBatch, batch: TrainBatch
    ) -> dict[tuple[str, int], Future[TrainResult]]:
        """Start all optimizer steps of these roles; futures by role and number."""
        steps: dict[tuple[str, int], Future[TrainResult]] = {}
        for name in names:
            role = self.roles[name]
            plans = role.plan(batch.samples, self.progress.step)
            begun = self._streamed.scale if self._streamed is not None and name == ACTOR else None
            started = role.start(shared, plans, self.progress.step, self.loss_of(role, batch.kl_coef), begun=begun)
            for left_out, why in (
                (role.steps_of_batch - len(plans), "the batch has fewer groups than that, and groups are not split"),
                (len(plans) - len(started), "their samples have no loss tokens"),
            ):
                if left_out:
                    text = f"step {self.progress.step}: {left_out} optimizer steps of {name} are skipped: {why}"
                    self.progress.notice(text)
            steps |= {(name, index): future for index, future in enumerate(started)}
        return steps

    def loss_of(self, role: Role, kl_coef: float) -> LossSpec:
        """The loss of a role that is trained, with the current coefficient."""
        algorithm, loss = self.plan.algorithm.settings, role.loss
        assert loss is not None
        if algorithm.kl_target and algorithm.kl_in == "loss" and "kl_coef" in loss.params:
            return evolve(loss, params={**loss.params, "kl_coef": kl_coef})
        return loss

    # ---- ranks that die ---------------------------------------------------------------------------------------------

    def recovery(self) -> AbstractContextManager[Callable[[], bool]]:
        """A context in which ranks may die: then others start from the newest checkpoint, and the steps since then are
        repeated. Yields whether the block has ended otherwise."""
        return self.restarts.around(self._restore)

    def _restore(self, point: RestartPoint) -> None:
        """Go on from a checkpoint, with which the ranks have restarted."""
        self.sampling.source.close()
        self._streamed, self._pushed_at = None, None
        self.progress.step = point.step
        self.progress.emit(RunRewound(step=point.step))
        self._begin_snapshots(resumed=bool(point.state))
        self.kl_coef = self._kl_coef_in(point.state)
        self.sampling.restart(point.state, point.checkpoint)
        if self.updates is not None:
            self.sampling.source.renumber(self.updates.version - point.version)
            self.updates.new_rendezvous()  # the old ranks are still part of what was built at the old address
            self.sampling.loop.run(self.updates.fleet.reset())
        self.ensure_serving(force=True)
        self.evaluate()

    def _begin_snapshots(self, *, resumed: bool) -> None:
        """Make those that ranks which have restarted lack."""
        self.snapshots = evolve(self.snapshots, made=0)
        for text in self.snapshots.begin(self.progress.step, resumed=resumed):
            self.progress.notice(text)

    # ---- extensions that decide -------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Let extensions change the groups, or stop the run, if another step comes, and a run could resume here."""
        if self.stopping or self.progress.step >= self.plan.run.steps or not self._resumable:
            return
        changed = self.control.between_steps(self._checkpoint)
        if ACTOR in changed:
            self.residency.enter(COMPARE)  # for the actor's parameters
            self._begin_snapshots(resumed=True)
            self.snapshots.updated()
        if changed:
            self.push_weights()

    def _checkpoint(self) -> Path:
        """A complete checkpoint of this step, in memory if the run keeps those. Raises ResizeFailed if it cannot be
        written and all ranks are still there: the run goes on, and its next save may have room."""
        self.checkpoints.complete(wait=True)  # ranks that are about to end write it
        if self.memory is not None:
            self._save_in_memory(self.memory, background=False)
        saves = self.memory or self.checkpoints
        if saves.last_step != self.progress.step:
            try:
                self._start_save(saves, background=False)
            except SaveFailed as error:
                if any(role.group.processes.ended for role in self.roles.values()):
                    raise
                raise ResizeFailed(f"no checkpoint to restart from: {error.message}") from error
        assert saves.newest is not None
        return saves.newest

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def push_weights(self) -> None:
        """Update all engines to the actor's weights. Raises WeightUpdateError if an engine cannot be updated.

        Does nothing if engines already hold these weights, or in steps that weights.every skips."""
        if self.updates is None or not self._push_due(self.updates.fleet):
            return
        self.updates.push(self.sampling.source, self.control)
        self.residency.updated()
        new = self._pushed_at != self.actor.optimizer_step
        if new:
            self.snapshots.updated()
        if self.logprob_check is not None:
            self.logprob_check.pushed(self.updates.version - 1, new=new)
        self._pushed_at = self.actor.optimizer_step

    def ensure_serving(self, *, force: bool = False) -> None:
        """Replace dead engines, if there are any, and push weights to all, whatever the schedule says; with `force`
        also where none has died."""
        if force or (self.updates is not None and self.updates.fleet.dead):
            with self.training():
                self.push_weights()

    def _push_due(self, fleet: EngineFleet) -> bool:
        # Engines that slept, or are new, hold no weights.
        if self.residency.slept or self._pushed_at is None or not fleet.all_serve:
            return True
        every = self.plan.weights.every
        due = self.progress.step % every == 0 or any(self._evaluation_due(each) for each, *_ in self.sampling.held_out)
        return due and self._pushed_at != self.actor.optimizer_step

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context for all verbs that use ranks. If ranks and engines share devices, ranks sleep outside of it;
        inside, each verb wakes what it reads, and the engines' weights sleep until new ones are pushed."""
        yield
        self.residency.enter(SAMPLE)

    # ---- reports and checkpoints ------------------------------------------------------------------------------------

    def report(
        self, scored: ScoredRollout, batch: TrainBatch | None, results: Mapping[str, Sequence[TrainResult]]
    ) -> None:
        """Report one rollout step; `batch` is None if it was not for training."""
        require_there(self.plan.start.run_dir)
        now = time.perf_counter()
        rollout = rollout_metrics(scored)
        seconds = {**scored.seconds, **self.progress.seconds.take()}
        metrics = {**rollout, **(batch.metrics if batch else {})}
        if batch and self.plan.algorithm.settings.old_logprobs == "recompute":
            metrics |= recomputed_mismatch(batch.samples)
        elif ACTOR in results:
            metrics |= first_step_mismatch(results[ACTOR][0])
        for name, steps in results.items():
            role = self.roles[name]
            prefix = "train" if name == ACTOR else name
            metrics |= train_metrics(steps, role.lr(role.optimizer_step - 1), prefix=prefix)  # of the last step
        if self.updates is not None:
            self.updates.fleet.step_completed()
        self.restarts.step_done()
        metrics |= self.residency.metrics()
        if line := self.residency.settle():
            self.progress.notice(line)
        metrics |= compilations(results)
        metrics |= time_metrics(seconds, now - self._step_started, rollout["rollout/tokens"])
        engines = self.updates.fleet.names if self.updates is not None else ()
        waits = idle(self.progress.spans.take(), self._step_started, now, engines=engines)
        metrics |= idle_seconds(waits, engines=len(engines))
        for line in self.notices.of(scored, batch, results):
            self.progress.notice(line)
        self._step_started = now
        self.progress.emit(
            StepFinished(
                step=scored.step,
                metrics=metrics,
                shown=scored.shown(),
                samples=scored.samples(),
                idle=[
                    evolve(each, started=self._epoch + each.started, ended=self._epoch + each.ended) for each in waits
                ],
            )
        )

    def evaluate(self, *, always: bool = False) -> None:
        """Evaluate on the sets of held-out prompts that are due. That depends only on the steps done, so a resumed run
        evaluates at the same steps as an uninterrupted one."""
        due = [each for each in self.sampling.held_out if always or self._evaluation_due(each[0])]
        if due:
            found = []
            for held_out, sampler, reward in due:
                with self.progress.phase("eval"):
                    found.append(self._served(evaluate(sampler, held_out, reward)))
                if first := found[-1].first_failure:
                    failed = sum(found[-1].failures.values())
                    why = f"{failed} samples failed; the first: {first}" if failed else first
                    self.progress.notice(f"evaluation{f' of {held_out.name!r}' * bool(held_out.name)}: {why}")
            shown = found[0].shown
            if due[0] is self.sampling.held_out[0]:
                if _questions(self._before) != _questions(shown):  # the checkpoint's may be of other data
                    self._before = shown
                self._after = shown
            metrics = {name: value for each in found for name, value in each.metrics.items()}
            self._evaluation = metrics
            self.progress.emit(
                Evaluated(
                    step=self.progress.step,
                    metrics=metrics,
                    shown=shown,
                    samples=[sample for each in found for sample in each.samples],
                )
            )
        self.progress.begin("rollout" if self.sampling.sampler else "reading")

    def _evaluation_due(self, held_out: EvalSet) -> bool:
        every = held_out.every
        if not every or self.sampling.sampler is None:
            return False
        if self.progress.step == 0:
            return self.plan.eval.at_start
        return self.progress.step % every == 0 or self.progress.step >= self.plan.run.steps

    def save(self) -> None:
        """Commit a checkpoint that has been written; start a new one if due."""
        with self.progress.seconds("save"), self.progress.spans("save"):
            self.checkpoints.complete(wait=False)
            last = self.progress.step >= self.plan.run.steps or self.stopping  # while a rank that dies is replaced
            if last or self.checkpoints.due(self.progress.step):
                self._start_save(self.checkpoints, background=self.plan.checkpoint.background and not last)
            if self.memory is not None and self._resumable and not last:
                self._save_in_memory(self.memory, background=True)

    def _save_in_memory(self, memory: MemoryCheckpoints, *, background: bool) -> None:
        """Start an in-memory checkpoint of this step, if there is none, or else complete it."""
        try:
            if memory.last_step != self.progress.step:
                self._start_save(memory, background=background)
            memory.complete(wait=not background)
        except SaveFailed as error:
            self.progress.notice(f"no more in-memory checkpoints: {error.message}")
            self.memory = None
            memory.give_up()

    def _start_save(self, saves: Checkpoints, *, background: bool) -> None:
        schedules = {
            name: asdict(role.schedule_state) for name, role in self.roles.items() if role.schedule_state is not None
        }
        state = {
            "rollout_step": self.progress.step,
            # Saved only if adapted: otherwise a resumed run that adapts it starts from its own config.
            **({"kl_coef": self.kl_coef} if self.plan.algorithm.settings.kl_target else {}),
            "source": self.sampling.source.position,
            **({"data": self.plan.rollout.prompts.record} if self.plan.run.samples else {}),
            **({"schedules": schedules} if schedules else {}),
            **({"kept": dict(self.plan.kept)} if self.plan.kept else {}),
            "config": self.control.plan.record,
            "before": [asdict(shown) for shown in self._before],
        }
        saves.start(
            self.progress.step,
            state,
            background=background,
            files=self.sampling.source.save,
            enter=lambda role: self.residency.enter(saving(role)),
        )

    def finish(self) -> Summary:
        """Save what is not saved yet, export, and report how the run ended."""
        require_there(self.plan.start.run_dir)
        # A stop request during the last step has nothing left to stop.
        done = self.progress.step >= self.plan.run.steps or self.plan.run.mode == "eval"
        reason = "interrupted" if self.stop.requested and not done else "finished"
        artifacts = {"run directory": str(self.plan.start.run_dir)}
        if self.plan.run.mode == "rollout-only":
            artifacts["rollouts"] = str(self.plan.start.run_dir / "rollouts")
        if self.plan.run.trains:
            artifacts |= self._finish_training(export=self.plan.checkpoint.export and reason == "finished")
        if reason == "interrupted" and self.plan.run.trains:
            artifacts["to go on"] = (
                f"the same command with {shlex.quote(f'run.dir={self.plan.start.run_dir}')} checkpoint.resume=auto"
            )
        self.progress.emit(
            RunFinished(
                reason=reason,
                steps_done=self.progress.step,
                seconds=self.progress.elapsed,
                before=self._before,
                after=self._after,
                artifacts=artifacts,
            )
        )
        return Summary(
            reason=reason, run_dir=self.plan.start.run_dir, steps_done=self.progress.step, evaluation=self._evaluation
        )

    def _finish_training(self, *, export: bool) -> dict[str, str]:
        """Save and export; returns the paths of the results by kind."""
        self.progress.begin("saving")
        if self.checkpoints.last_step != self.progress.step:
            self.residency.enter(REST)
            self._start_save(self.checkpoints, background=False)
        self.checkpoints.complete(wait=True)
        newest = self.checkpoints.newest
        if newest is None:
            return {}
        artifacts = {"checkpoint": str(newest)}
        if export:
            from corerl.driver.export import export as write_model

            self.progress.begin("exporting")
            target = self.plan.start.run_dir / EXPORT
            artifacts["model"] = str(write_model(newest, target, replace=True, notify=self.progress.notice))
        return artifacts
