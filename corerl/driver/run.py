"""A run's parts on the driver, and the verbs that the loop calls on them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, define, field, frozen

from corerl.algorithms.advantages import broadcast, group_advantages
from corerl.algorithms.schedules import learning_rate
from corerl.cluster.objects import share
from corerl.config.load import to_plain
from corerl.config.schema import Config, TrainConfig
from corerl.data.plan import StepPlan, plan_forward, plan_steps
from corerl.data.prompts import Prompt
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.metrics import mismatch_metrics, rollout_metrics, time_metrics, train_metrics
from corerl.driver.stop import StopRequest
from corerl.errors import WeightUpdateError
from corerl.observability.timing import Phases
from corerl.plugin.events import (
    Evaluated,
    Event,
    PhaseStarted,
    RunFinished,
    Shown,
    StepFinished,
)
from corerl.plugin.observers import Observers
from corerl.rollout.engine import Received, SamplingParams
from corerl.rollout.fleet import EngineFleet
from corerl.rollout.rewards import Reward
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources import Scored, Synchronous, evaluate
from corerl.trainer.group import GroupTrainResult, TrainGroup
from corerl.types import FloatArray, LossSpec, Output, SampleBatch, Step, UpdateResult
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

REFERENCE = "reference"  # the snapshot that KL is measured against
POLL_SECONDS = 0.1  # between looks at the ranks and at the engines, while weights go from one to the other


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


@define(kw_only=True)
class Run:
    """Everything between the config and the loop. Counters move in the loop; all else happens in these verbs."""

    config: Config
    run_dir: Path
    observers: Observers
    phases: Phases
    stop: StopRequest
    actor: TrainGroup
    fleet: EngineFleet
    source: Synchronous
    sampler: Sampler
    reward: Reward
    params: SamplingParams
    held_out: Sequence[Prompt]
    loss: LossSpec
    manifest: Manifest
    address: Address
    checkpoints: Checkpoints
    offload: bool  # ranks and engines share devices and take turns in their memory

    optimizer_step: int
    rollout_step: int
    weights_version: int  # the next one to be pushed

    started: float = field(factory=time.perf_counter)
    _step_started: float = field(factory=time.perf_counter)
    _before: tuple[Shown, ...] = ()  # of the first evaluation, which a resumed run has from its checkpoint
    _after: tuple[Shown, ...] = ()
    _evaluation: dict[str, float] = field(factory=dict)

    # ---- where it stands --------------------------------------------------------------------------------------------

    @property
    def train_config(self) -> TrainConfig:
        return self.config.train_of("actor")

    @property
    def step(self) -> Step:
        """The optimizer step that comes next."""
        return Step(
            optimizer_step=self.optimizer_step,
            rollout_step=self.rollout_step,
            lr=self._lr(self.optimizer_step),
        )

    def _lr(self, optimizer_step: int) -> float:
        train = self.train_config
        return learning_rate(
            warmup_steps=train.schedule.warmup_steps,
            decay=train.schedule.decay,
            final_ratio=train.schedule.final_ratio,
            peak=train.optimizer.lr,
            step=optimizer_step,
            total_steps=self.config.run.steps * train.mini_batches * train.epochs,
        )

    def tell(self, event: Event) -> None:
        self.observers.emit(event)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shown while it lasts, and counted in the step's seconds."""
        self.tell(PhaseStarted(name=name, step=self.rollout_step))
        with self.phases(name):
            yield

    # ---- from samples to optimizer steps ----------------------------------------------------------------------------

    def with_advantages(self, scored: Scored) -> SampleBatch:
        """The samples with everything the loss reads: advantages, old and, with a KL penalty, reference log-probs."""
        algorithm, samples = self.config.algorithm, scored.rollout.batch
        advantages = group_advantages(scored.rewards, samples.rows["group"], normalize_std=algorithm.normalize_std)
        columns = {"advantages": broadcast(advantages, samples), "old_logprobs": samples.columns["rollout_logprobs"]}
        recompute = algorithm.old_logprobs == "recompute"
        if recompute or algorithm.kl_coef:
            with self.phase("forward"):
                shared = share(samples)
                if recompute:
                    columns["old_logprobs"] = self._logprobs(shared, samples, weights="")
                if algorithm.kl_coef:
                    columns["ref_logprobs"] = self._logprobs(shared, samples, weights=REFERENCE)
        return samples.with_columns(**columns)

    def _logprobs(self, shared: Any, samples: SampleBatch, *, weights: str) -> FloatArray:
        layout = self.actor.layouts[0]
        plan = plan_forward(
            samples,
            dp_size=layout.dp_size,
            tokens_per_micro_batch=self.train_config.tokens_per_micro_batch,
            sequence_multiple=layout.sequence_multiple,
            micro_batch_multiple=layout.micro_batch_multiple,
        )
        logprobs = self.actor.forward(shared, plan, (Output.LOGPROBS,), of=samples, weights=weights)[Output.LOGPROBS]
        return np.where(samples.columns["loss_mask"], logprobs, np.float32(0.0))

    def plan(self, samples: SampleBatch) -> list[StepPlan]:
        """The optimizer steps of this rollout batch."""
        layout, train = self.actor.layouts[0], self.train_config
        return plan_steps(
            samples,
            mini_batches=train.mini_batches,
            epochs=train.epochs,
            dp_size=layout.dp_size,
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            sequence_multiple=layout.sequence_multiple,
            micro_batch_multiple=layout.micro_batch_multiple,
            aggregation=self.config.algorithm.aggregation,
            max_tokens=self.config.rollout.max_tokens,
            seed=self.config.run.seed * 1_000_003 + self.rollout_step,
        )

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def push_weights(self) -> None:
        """All engines serve the actor's weights when this returns. Raises WeightUpdateError where one does not."""
        with self.phase("update_weights"):
            if self.offload:
                self.fleet.wake_up()
            sending = self.actor.update_weights_async(self.address, self.weights_version)
            receiving = self.fleet.receive_async(self.manifest, self.weights_version, self.address)
            result, received = self._wait_pushed(sending, receiving)
        failed = {name: received[name].error or error for name, error in result.engines.items() if error}
        failed |= {name: each.error for name, each in received.items() if each.error}
        if failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
            raise WeightUpdateError(f"weights version {self.weights_version} did not reach every engine: {reasons}")
        self.weights_version += 1

    def _wait_pushed(self, sending: Any, receiving: Any) -> tuple[UpdateResult, dict[str, Received]]:
        """For both sides at once: either would wait in vain for the other, until a timeout, where that one has died."""
        result: UpdateResult | None = None
        received: dict[str, Received] | None = None
        while result is None or received is None:
            if result is None and self.actor.processes.ready(sending, POLL_SECONDS):
                result = self.actor.wait_update(sending)
            if received is None and self.fleet.processes.ready(receiving, POLL_SECONDS):
                received = self.fleet.wait_received(receiving)
        return result, received

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Where ranks and engines share devices they take turns: inside, the ranks are resident and the engines'
        weights sleep until new ones are pushed; outside, the ranks sleep."""
        if self.offload:
            with self.phase("wake_up"):
                self.fleet.sleep()
                self.actor.wake_up()
        yield
        if self.offload:
            with self.phase("sleep"):
                self.actor.sleep()

    # ---- what the user sees and keeps -------------------------------------------------------------------------------

    def report(self, scored: Scored, samples: SampleBatch, results: Sequence[GroupTrainResult]) -> None:
        now = time.perf_counter()
        rollout = rollout_metrics(scored)
        seconds = {**scored.seconds, **self.phases.take()}
        recomputed = self.config.algorithm.old_logprobs == "recompute"
        metrics = {
            **rollout,
            **mismatch_metrics(samples, results[0], recomputed=recomputed),
            **train_metrics(results, self._lr(self.optimizer_step - 1)),  # of the last step that was done
            **time_metrics(seconds, now - self._step_started, rollout["rollout/tokens"]),
        }
        self._step_started = now
        self.tell(StepFinished(step=scored.step, metrics=metrics, shown=scored.shown()))

    def evaluate(self) -> None:
        """On the held-out prompts, where it is due: a function of the steps done alone, so that a resumed run evaluates
        where an uninterrupted one does."""
        if self.held_out and self._evaluation_due():
            with self.phase("eval"):
                evaluation = evaluate(self.sampler, self.held_out, self.reward, params=self.params)
            self._evaluation = evaluation.metrics
            self._before = self._before or evaluation.shown
            self._after = evaluation.shown
            self.tell(Evaluated(step=self.rollout_step, metrics=evaluation.metrics, shown=evaluation.shown))
        self.tell(PhaseStarted(name="rollout", step=self.rollout_step))

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
            "optimizer_step": self.optimizer_step,
            "source": self.source.position,
            "config": to_plain(self.config),
            "before": [asdict(shown) for shown in self._before],
        }
        self.checkpoints.start(self.step, state, background=background)

    def finish(self) -> Summary:
        """Save what is not saved, export, and tell how it went."""
        # A request that comes in the last step has nothing left to stop.
        reason = "interrupted" if self.stop.requested and self.rollout_step < self.config.run.steps else "finished"
        self.tell(PhaseStarted(name="saving", step=self.rollout_step))
        if self.checkpoints.last_step != self.rollout_step:
            if self.offload:
                self.fleet.sleep()
                self.actor.wake_up()
            self._start_save(background=False)
        self.checkpoints.complete(wait=True)
        artifacts = {"run directory": str(self.run_dir)}
        newest = self.checkpoints.newest
        if newest is not None:
            artifacts["checkpoint"] = str(newest)
            if self.config.checkpoint.export and reason == "finished":
                from corerl.driver.export import export

                self.tell(PhaseStarted(name="exporting", step=self.rollout_step))
                artifacts["model"] = str(export(newest, self.run_dir / "model", replace=True))
        if reason == "interrupted":
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
