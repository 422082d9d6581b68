"""A run's parts on the driver, and the verbs that the loop calls on them."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve, field, frozen

from corerl.algorithms.kl import adapted_coefficient
from corerl.algorithms.overlong import without_truncated
from corerl.cluster.objects import share
from corerl.config.load import to_plain
from corerl.config.schema import Config
from corerl.data.prompts import Prompt
from corerl.driver.advantages import Stamped, stamp
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.metrics import (
    first_step_mismatch,
    recomputed_mismatch,
    rollout_metrics,
    staleness_metrics,
    time_metrics,
    train_metrics,
)
from corerl.driver.roles import Role
from corerl.driver.routing import routed
from corerl.driver.stop import StopRequest
from corerl.driver.together import POLL_SECONDS, Call, together
from corerl.errors import CorerlError, WeightUpdateError, WorkerDied
from corerl.observability.timing import Phases
from corerl.plugin.events import (
    Evaluated,
    Event,
    Notice,
    PhaseStarted,
    RunFinished,
    Shown,
    StepFinished,
)
from corerl.plugin.observers import Observers
from corerl.rollout.engine import Received, SamplingParams
from corerl.rollout.fleet import EngineFleet
from corerl.rollout.rewards import Scorer
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources import Scored, Source, evaluate
from corerl.trainer.assign import ACTOR, CRITIC
from corerl.trainer.group import GroupTrainResult, TrainGroup
from corerl.types import LossSpec, Output
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address
from corerl.weights.verify import difference

CONSTANT_STEPS = 3  # in a row with one reward for all samples before the user is told
TELL_SECONDS = 1.0  # between two times that senders are told of an engine that failed
ANSWER_SECONDS = 60.0  # that an engine has to answer once the senders have ended
REFERENCE = "reference"  # the snapshot that KL is measured against


def meeting_at(address: Address, actor: TrainGroup) -> Address:
    """The same, at a new place, where a transport has senders and receivers meet: a socket in the actor's first rank,
    or names that nobody else has."""
    if address.transport != "collective":
        return evolve(address, token=uuid.uuid4().hex)
    if not address.engines:
        return address
    host, port, listening = actor.processes.listen(0)
    return evolve(address, host=host, port=port, listening=listening)


def answers_in(state: Mapping[str, Any]) -> tuple[Shown, ...]:
    """The first evaluation's, as a checkpoint's state holds them."""
    return tuple(Shown(**shown) for shown in state.get("before", []))


@frozen(kw_only=True)
class Summary:
    """How a run ended."""

    reason: str  # finished or interrupted
    run_dir: Path
    steps_done: int
    evaluation: dict[str, float] = field(factory=dict)  # the last one's metrics


@frozen(kw_only=True, eq=False)
class Pass:
    """One pass of all samples through a role's model, without gradients."""

    role: str
    columns: Mapping[str, Output]  # what becomes of its outputs
    weights: str = ""  # a snapshot's name
    replay: bool = False  # through the experts that the column `routed_experts` names


@define(kw_only=True)
class Run:
    """Everything between the config and the loop. Counters move in the loop; all else happens in these verbs."""

    config: Config
    run_dir: Path
    observers: Observers
    phases: Phases
    stop: StopRequest
    roles: Mapping[str, Role]
    fleet: EngineFleet | None  # None where nothing is sampled
    source: Source
    sampler: Sampler | None
    reward: Scorer
    params: SamplingParams
    held_out: Sequence[Prompt]
    manifest: Manifest
    address: Address
    checkpoints: Checkpoints
    offloaded: Sequence[str] = ()  # roles that share devices with engines and take turns with them in their memory

    rollout_step: int
    weights_version: int  # the next one to be pushed
    kl_coef: float  # what algorithm.kl_coef has been adapted to

    started: float = field(factory=time.perf_counter)
    _step_started: float = field(factory=time.perf_counter)
    _pushed_at: int | None = None  # the actor's optimizer step whose weights the engines hold
    _pushes: int = 0  # that all engines took
    _unverified: set[str] = field(factory=set)  # engines that cannot tell what they hold
    _served: set[str] = field(factory=set)  # engines whose process has taken an update
    _before: tuple[Shown, ...] = ()  # of the first evaluation, which a resumed run has from its checkpoint
    _after: tuple[Shown, ...] = ()
    _constant: int = 0  # steps in a row whose rewards were all equal
    _evaluation: dict[str, float] = field(factory=dict)

    # ---- where it stands --------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether a request to stop is heeded now: where engines have just got new weights, as a resumed run's do."""
        fresh = not self.config.run.samples or self.rollout_step % self.config.weights.every == 0
        return self.stop.requested and fresh

    @property
    def actor(self) -> Role:
        return self.roles[ACTOR]

    def tell(self, event: Event) -> None:
        self.observers.emit(event)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shown while it lasts, and counted in the step's seconds."""
        self.tell(PhaseStarted(name=name, step=self.rollout_step))
        with self.phases(name):
            yield

    # ---- from samples to optimizer steps ----------------------------------------------------------------------------

    def with_advantages(self, scored: Scored) -> Stamped:
        """The samples with everything the losses read, from the models as they are before the first step."""
        algorithm, samples = self.config.algorithm, scored.rollout.batch
        if algorithm.overlong == "mask":
            samples = without_truncated(samples)
        samples = routed(samples, self.config)
        samples = samples.with_columns(old_logprobs=samples.columns["rollout_logprobs"])
        passes = self._passes
        if passes:
            shared = share(samples)
            calls = {
                each: self.roles[each.role].start_forward(
                    shared, samples, tuple(each.columns.values()), weights=each.weights, replay=each.replay
                )
                for each in passes
            }
            with self.phase("forward"):
                for each, found in together(calls).items():
                    samples = samples.with_columns(**{name: found[output] for name, output in each.columns.items()})
        stamped = stamp(
            samples, scored.rewards, algorithm, kl_coef=self.kl_coef, max_tokens=self.config.rollout.max_tokens
        )
        if self.fleet is not None:
            staleness = staleness_metrics(samples, self.weights_version - 1)
            stamped = evolve(stamped, metrics={**staleness, **stamped.metrics})
        if algorithm.kl_target and stamped.kl is not None:
            self.kl_coef = adapted_coefficient(
                self.kl_coef,
                stamped.kl,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
                samples=len(samples),
            )
        return stamped

    @property
    def _passes(self) -> list[Pass]:
        algorithm, passes = self.config.algorithm, []
        if algorithm.old_logprobs == "recompute":
            columns = {"old_logprobs": Output.LOGPROBS}
            if algorithm.routing_replay == "recompute":
                columns[Output.ROUTED_EXPERTS.value] = Output.ROUTED_EXPERTS
            # Through the engine's experts, where these are trained: the first ratio is 1.
            passes.append(Pass(role=ACTOR, columns=columns, replay=algorithm.routing_replay == "engine"))
        if algorithm.kl_coef:
            passes.append(Pass(role=ACTOR, columns={"ref_logprobs": Output.LOGPROBS}, weights=REFERENCE))
        if CRITIC in self.roles:
            passes.append(Pass(role=CRITIC, columns={"values": Output.VALUES}))
        return passes

    def optimize(self, stamped: Stamped) -> dict[str, list[GroupTrainResult]]:
        """All optimizer steps of the batch, of all roles at the same time; results by role, in the steps' order. None
        where no token is left to learn from."""
        samples = stamped.samples
        if not samples.columns["loss_mask"].any():
            self.tell(Notice(text=f"step {self.rollout_step} is passed over: none of its samples has a loss token"))
            return {}
        shared = share(samples)
        with self.phase("train"):
            calls = {}
            for name, role in self.roles.items():
                if self.rollout_step < role.first_step:
                    continue
                started = role.start(shared, samples, self.rollout_step, self._loss(role, stamped.kl_coef))
                if left_out := role.train.mini_batches * role.train.epochs - len(started):
                    self.tell(
                        Notice(
                            text=f"step {self.rollout_step}: {left_out} optimizer steps of {name} are left out: no "
                            "sample in them has a loss token"
                        )
                    )
                for index, pending in enumerate(started):
                    calls[name, index] = Call(
                        role.group.processes, pending, functools.partial(role.group.wait_train, pending)
                    )
            finished = together(calls)
        results: dict[str, list[GroupTrainResult]] = {}
        for (name, _), result in finished.items():
            results.setdefault(name, []).append(result)
        return results

    def _loss(self, role: Role, kl_coef: float) -> LossSpec:
        algorithm = self.config.algorithm
        if algorithm.kl_target and algorithm.kl_in == "loss" and "kl_coef" in role.loss.params:
            return evolve(role.loss, params={**role.loss.params, "kl_coef": kl_coef})
        return role.loss

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def push_weights(self) -> None:
        """All engines serve the actor's weights when this returns. Raises WeightUpdateError where one does not.

        Nothing is sent where engines hold these weights already, nor in the steps that weights.every passes over."""
        fleet = self.fleet
        if fleet is None or not self._push_due(fleet):
            return
        every = self.config.weights.verify_every
        verify = every > 0 and self._pushes % every == 0
        while failed := self._attempt(fleet, verify=verify):
            self._evict(fleet, failed)
        self._pushes += 1
        self._pushed_at = self.actor.optimizer_step

    def _attempt(self, fleet: EngineFleet, *, verify: bool) -> dict[str, Received]:
        """One update of all engines. Those that it did not reach, which serve nothing now, with why."""
        with contextlib.ExitStack() as stack:
            if self.config.rollout.source != "synchronous":
                with self.phase("hold"):
                    stack.enter_context(self.source.updating(self.weights_version))
            if fleet.dead:
                self._replace(fleet, fleet.replace_dead)
            with self.phase("update_weights"):
                return self._update(fleet, verify=verify)

    def _update(self, fleet: EngineFleet, *, verify: bool) -> dict[str, Received]:
        # Used even where no engine takes it: two streams must never share a version.
        version, self.weights_version = self.weights_version, self.weights_version + 1
        if self.offloaded:
            fleet.wake_up()
        group = self.actor.group
        sending = group.update_weights_async(self.address, version, verify=verify)
        receiving = fleet.receive_async(self.manifest, version, self.address)
        told = 0.0
        while not group.processes.ready(sending, POLL_SECONDS):
            # Senders would wait in vain, until a timeout, for an engine that has died, or is done with it.
            failed = {name: each for name, each in fleet.received(receiving, 0.0).items() if each.error}
            if failed and time.monotonic() - told > TELL_SECONDS:  # again: a rank may not have begun
                told = time.monotonic()
                for name, each in failed.items():
                    group.give_up(name, each.error)
        result = group.wait_update(sending)
        silent = Received(version=version, bytes=0, error="it does not answer", died=True)
        received = dict.fromkeys(fleet.names, silent) | fleet.received(receiving, ANSWER_SECONDS)
        failed = {name: each for name, each in received.items() if each.error}
        failed |= {
            name: evolve(received[name], error=error)
            for name, error in result.engines.items()
            if error and not received[name].error
        }
        fleet.lost_weights(failed)
        self._served |= received.keys() - failed.keys()
        if result.sums and not failed:
            self._require_loaded(fleet, result.sums, version)
        return failed

    def _require_loaded(self, fleet: EngineFleet, sums: Mapping[str, int], version: int) -> None:
        """Raises WeightUpdateError where an engine holds something else than was sent."""
        for name, loaded in fleet.weight_sums(self.manifest.dtype).items():
            if loaded is None:
                if name not in self._unverified:
                    self.tell(
                        Notice(
                            text=f"{name} cannot tell what it has loaded (Engine.weight_sums): it is not compared with "
                            "what was sent; weights.verify_every=0 asks no more"
                        )
                    )
                self._unverified.add(name)
            elif wrong := difference(sums, loaded):
                raise WeightUpdateError(
                    f"{name} holds other weights than it was sent as version {version}: {wrong}; it loads them wrongly"
                )

    def _evict(self, fleet: EngineFleet, failed: Mapping[str, Received]) -> None:
        """New processes in the place of the dead, whose deaths explain the other failures; of those that failed, where
        all live. They rejoin with the next full update.

        Raises WeightUpdateError of an engine that lives and has never taken an update: the next would end the same.
        """
        dead = {name: each for name, each in failed.items() if each.died}
        if not dead and (never := sorted(failed.keys() - self._served)):
            reasons = "; ".join(f"{name}: {failed[name].error}" for name in never)
            raise WeightUpdateError(f"weights version {self.weights_version - 1} did not reach every engine: {reasons}")
        errors: dict[str, CorerlError] = {
            name: WorkerDied(each.error) if each.died else WeightUpdateError(f"{name}: {each.error}")
            for name, each in (dead or failed).items()
        }

        def replace() -> Mapping[str, CorerlError]:
            fleet.replace(errors)
            return errors

        self._replace(fleet, replace)

    def mend_engines(self) -> None:
        """New engines in the place of those that have died, where no update comes by itself."""
        if self.fleet is not None and self.fleet.dead:
            self.bring_weights()

    def bring_weights(self) -> None:
        """To new engines, in the place of those that have died."""
        with self.training():
            self.push_weights()

    def _replace(self, fleet: EngineFleet, replace: Callable[[], Mapping[str, CorerlError]]) -> None:
        """New engines, which `replace` starts and names with what the old ones died of. Where ranks and engines take
        turns in memory a new one finds it as at the start of the run: it takes what it wants, and sleeps."""
        if self.offloaded:
            self._rest_ranks()
        replaced = replace()
        if self.offloaded:
            self._wake_ranks()
        for engine, error in replaced.items():
            self.tell(Notice(text=f"{engine} is replaced: {error.message}"))
        self._served -= replaced.keys()
        self.address = meeting_at(self.address, self.actor.group)  # the dead one hangs in whatever was built at the old

    def _push_due(self, fleet: EngineFleet) -> bool:
        if self.offloaded or self._pushed_at is None or fleet.dead:  # engines that have slept, or are new, hold none
            return True
        every = self.config.weights.every
        due = self.rollout_step % every == 0 or self._evaluation_due()
        return due and self._pushed_at != self.actor.optimizer_step

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Where ranks and engines share devices they take turns: inside, the ranks are resident and the engines'
        weights sleep until new ones are pushed; outside, the ranks sleep."""
        if self.offloaded:
            with self.phase("wake_up"):
                self._wake_ranks()
        yield
        if self.offloaded:
            with self.phase("sleep"):
                self._rest_ranks()

    def _rest_ranks(self) -> None:
        for name in self.offloaded:
            for rank, slept in enumerate(self.roles[name].group.sleep()):
                for note in slept.notes:
                    self.tell(Notice(text=f"{name} rank {rank}: {note}"))

    def _wake_ranks(self) -> None:
        if self.fleet is not None:
            self.fleet.sleep()
        for name in self.offloaded:
            self.roles[name].group.wake_up()

    # ---- what the user sees and keeps -------------------------------------------------------------------------------

    def report(
        self, scored: Scored, stamped: Stamped | None, results: Mapping[str, Sequence[GroupTrainResult]]
    ) -> None:
        """Tell of one rollout step; `stamped` is None where it was not for training."""
        now = time.perf_counter()
        rollout = rollout_metrics(scored)
        seconds = {**scored.seconds, **self.phases.take()}
        metrics = {**rollout, **(stamped.metrics if stamped else {})}
        if stamped and self.config.algorithm.old_logprobs == "recompute":
            metrics |= recomputed_mismatch(stamped.samples)
        elif ACTOR in results:
            metrics |= first_step_mismatch(results[ACTOR][0])
        for name, steps in results.items():
            role = self.roles[name]
            prefix = "train" if name == ACTOR else name
            metrics |= train_metrics(steps, role.lr(role.optimizer_step - 1), prefix=prefix)  # of the last step done
        if self.fleet is not None:
            self.fleet.step_completed()
        metrics |= time_metrics(seconds, now - self._step_started, rollout["rollout/tokens"])
        self._warn(scored)
        self._step_started = now
        self.tell(StepFinished(step=scored.step, metrics=metrics, shown=scored.shown()))

    def _warn(self, scored: Scored) -> None:
        """Of what makes a step teach less than it could."""
        if scored.first_failure:
            failed = sum(scored.failures.values())
            self.tell(Notice(text=f"step {scored.step}: {failed} samples failed; the first: {scored.first_failure}"))
        rewards = scored.rewards
        self._constant = self._constant + 1 if len(rewards) > 1 and (rewards == rewards[0]).all() else 0
        if self._constant == CONSTANT_STEPS:
            self.tell(
                Notice(
                    text=f"every sample of the last {CONSTANT_STEPS} steps had the reward {rewards[0]:g}: nothing is "
                    "learned from that; look at reward.name, data.answer_key, and what is sampled"
                )
            )

    def evaluate(self, *, always: bool = False) -> None:
        """On the held-out prompts, where it is due: a function of the steps done alone, so that a resumed run evaluates
        where an uninterrupted one does."""
        if self.sampler is not None and self.held_out and (always or self._evaluation_due()):
            with self.phase("eval"):
                evaluation = evaluate(self.sampler, self.held_out, self.reward, params=self.params)
            self._evaluation = evaluation.metrics
            if evaluation.first_failure:
                failed = sum(evaluation.failures.values())
                self.tell(Notice(text=f"evaluation: {failed} samples failed; the first: {evaluation.first_failure}"))
            self._before = self._before or evaluation.shown
            self._after = evaluation.shown
            self.tell(Evaluated(step=self.rollout_step, metrics=evaluation.metrics, shown=evaluation.shown))
        self.tell(PhaseStarted(name="rollout" if self.sampler else "reading", step=self.rollout_step))

    def _evaluation_due(self) -> bool:
        every = self.config.eval.every
        if not every:
            return False
        if self.rollout_step == 0:
            return self.config.eval.at_start
        return self.rollout_step % every == 0 or self.rollout_step >= self.config.run.steps

    def save(self) -> None:
        """Where one is due, begin a checkpoint; where one is written, make it visible."""
        with self.phases("save"):
            self.checkpoints.complete(wait=False)
            if self.checkpoints.due(self.rollout_step):
                self._start_save(background=self.config.checkpoint.background)

    def _start_save(self, *, background: bool) -> None:
        state = {
            "rollout_step": self.rollout_step,
            "kl_coef": self.kl_coef,
            "source": self.source.position,
            "config": to_plain(self.config),
            "before": [asdict(shown) for shown in self._before],
        }
        self.checkpoints.start(self.rollout_step, state, background=background, files=self.source.save)

    def finish(self) -> Summary:
        """Save what is not saved, export, and tell how it went."""
        # A request that comes in the last step has nothing left to stop.
        done = self.rollout_step >= self.config.run.steps or self.config.run.mode == "eval"
        reason = "interrupted" if self.stop.requested and not done else "finished"
        artifacts = {"run directory": str(self.run_dir)}
        if self.config.run.mode == "rollout-only":
            artifacts["rollouts"] = str(self.run_dir / "rollouts")
        if self.config.run.trains:
            artifacts |= self._finish_training(export=self.config.checkpoint.export and reason == "finished")
        if reason == "interrupted" and self.config.run.trains:
            artifacts["to go on"] = f"the same command with run.dir={self.run_dir} checkpoint.resume=auto"
        self.tell(
            RunFinished(
                reason=reason,
                steps_done=self.rollout_step,
                seconds=time.perf_counter() - self.started,
                before=self._before,
                after=self._after,
                artifacts=artifacts,
            )
        )
        return Summary(reason=reason, run_dir=self.run_dir, steps_done=self.rollout_step, evaluation=self._evaluation)

    def _finish_training(self, *, export: bool) -> dict[str, str]:
        """Paths of what is left, by what it is."""
        self.tell(PhaseStarted(name="saving", step=self.rollout_step))
        if self.checkpoints.last_step != self.rollout_step:
            if self.offloaded:
                self._wake_ranks()
            self._start_save(background=False)
        self.checkpoints.complete(wait=True)
        newest = self.checkpoints.newest
        if newest is None:
            return {}
        artifacts = {"checkpoint": str(newest)}
        if export:
            from corerl.driver.export import export as write_model

            self.tell(PhaseStarted(name="exporting", step=self.rollout_step))
            artifacts["model"] = str(write_model(newest, self.run_dir / "model", replace=True))
        return artifacts
