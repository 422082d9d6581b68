"""A role on the driver: its ranks, their training settings and progress; and its earlier weights as the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve

from corerl.algorithms.base import REFERENCE
from corerl.calls import Future
from corerl.config.load import config_of
from corerl.config.schema import AlgorithmConfig, TrainConfig
from corerl.data.packing import StepPlan, groups_of_steps
from corerl.driver.learning_rate import DecayStart, LearningRate
from corerl.driver.progress import Progress
from corerl.errors import ConfigError
from corerl.plan.plan import Plan
from corerl.plan.residency import ACTOR_WEIGHTS
from corerl.trainer.group import StoredBatch, TrainGroup
from corerl.types import Array, IntArray, LossSpec, Output, SampleBatch, Step, TrainResult


@define(kw_only=True)
class Role:
    """One role. `next_optimizer_step` advances as steps are started; each role counts its own."""

    name: str
    group: TrainGroup
    loss: LossSpec | None  # None if it is frozen: then it only passes samples
    train: TrainConfig
    seed: int
    trained_from: int = 0  # the rollout step in which its training starts
    rollout_steps: int  # that the learning-rate schedule spans, those before `trained_from` included
    next_optimizer_step: int
    decay_start: DecayStart | None = None

    @property
    def lr(self) -> LearningRate:
        schedule = self.train.schedule
        start = self.decay_start or DecayStart(optimizer_step=0, rollout_step=self.trained_from, progress=0.0)
        left = max(self.rollout_steps - start.rollout_step, 0) * self.steps_of_batch
        return LearningRate(
            warmup_steps=schedule.warmup_steps,
            decay=schedule.decay,
            final_ratio=schedule.final_ratio,
            peak=self.train.optimizer.lr,
            total_steps=start.optimizer_step + left,
            start=start.optimizer_step,
            progress=start.progress,
        )

    def keep_rate(self, before: TrainConfig, rollout_step: int) -> None:
        """Let the next step have the learning rate that it had with the mini-batches and epochs of `before`, which the
        first rollout steps had."""
        earlier = evolve(self, train=evolve(self.train, mini_batches=before.mini_batches, epochs=before.epochs))
        if earlier.steps_of_batch != self.steps_of_batch and self.next_optimizer_step:
            self.decay_start = DecayStart(
                optimizer_step=self.next_optimizer_step,
                rollout_step=rollout_step,
                progress=earlier.lr.decayed(self.next_optimizer_step),
            )

    @property
    def steps_of_batch(self) -> int:
        return self.train.mini_batches * self.train.epochs

    def step(self, rollout_step: int) -> Step:
        """The next optimizer step."""
        step = self.next_optimizer_step
        return Step(optimizer_step=step, rollout_step=rollout_step, lr=self.lr.at(step))

    def plan_steps(self, samples: SampleBatch, rollout_step: int) -> list[StepPlan]:
        """The optimizer steps of this rollout batch: `steps_of_batch`, or fewer if it has too few groups."""
        return self.group.plan_steps(samples, seed=self._seed(rollout_step))

    def groups_of_first_step(self, count: int, rollout_step: int) -> IntArray:
        """Which groups the first of these steps will train on, of a batch of `count`."""
        return groups_of_steps(count, self.train.mini_batches, self._seed(rollout_step))[0]

    def _seed(self, rollout_step: int) -> int:
        return self.seed * 1_000_003 + rollout_step

    def start_training(
        self,
        batch: StoredBatch,
        plans: Sequence[StepPlan],
        rollout_step: int,
        *,
        scale_of_accumulated: float | None = None,
    ) -> list[Future[TrainResult]]:
        """Start these optimizer steps of the batch; returns once their samples are in the object store. Steps
        without loss tokens are skipped: momentum and decay would move the weights without a gradient. Where ranks have
        accumulated the first step's gradients already, `scale_of_accumulated` is what these are multiplied by."""
        assert self.loss is not None
        started = []
        for number, plan in enumerate(plans):
            if not plan.scales.any():
                continue
            step = self.step(rollout_step)
            if scale_of_accumulated is not None and not number:
                started.append(self.group.optimizer_step(step, scale=scale_of_accumulated))
            else:
                started.append(self.group.train(batch, plan, self.loss, step))
            self.next_optimizer_step += 1
        return started

    def start_forward(
        self,
        batch: StoredBatch,
        outputs: tuple[Output, ...],
        *,
        snapshot: str = "",
        replay: bool = False,
    ) -> Future[dict[Output, Array]]:
        """Start one forward pass over all tokens. The result maps outputs to columns, which are 0 outside loss tokens,
        except that experts are given for every token."""

        def masked(found: Mapping[Output, Array]) -> dict[Output, Array]:
            mask = batch.samples.columns["loss_mask"]
            return {
                output: column if output is Output.ROUTED_EXPERTS else np.where(mask, column, np.float32(0.0))
                for output, column in found.items()
            }

        return self.group.forward(batch, outputs, snapshot=snapshot, replay=replay).then(masked)


@define(kw_only=True)
class ReferencePolicy:
    """A snapshot of the actor's weights in the host memory of the ranks of `group`, if a pass asks for it. Its verbs
    are called while the actor's parameters are resident."""

    group: TrainGroup
    asked: bool
    settings: AlgorithmConfig
    progress: Progress

    def begin(self, *, resumed: bool) -> None:
        """Recreate the snapshot, which newly started ranks do not have. Where a resumed run cannot recreate what an
        uninterrupted one would have, a notice says so."""
        if not self.asked:
            return
        step, every = self.progress.steps_done, self.settings.reference_every
        snapshot = self.group.snapshot(REFERENCE)
        if not (resumed and every):
            snapshot.load(self.settings.reference).result()
            return
        snapshot.create().result()  # from the checkpoint's weights, which are the reference at every such step
        if late := step % every:
            self.progress.notice(
                f"the reference policy is the actor after {step} steps, not after {step - late}, whose weights no "
                "checkpoint has"
            )

    def renew(self, steps: int, enter: Callable[[str], None]) -> None:
        """Make the actor's weights, which `enter` makes resident, the reference policy, if that is due after so many
        rollout steps."""
        every = self.settings.reference_every
        if every and steps % every == 0:
            enter(ACTOR_WEIGHTS)
            self.group.snapshot(REFERENCE).create().result()


def roles_of(plan: Plan, groups: Mapping[str, TrainGroup], *, notify: Callable[[str], None]) -> dict[str, Role]:
    """The roles of groups that have started. If the run resumes, their schedules continue; `notify` gets a line
    about a learning rate that jumps."""
    roles = {}
    for name, group in groups.items():
        objective, train = group.role_plan.objective, group.role_plan.train
        roles[name] = Role(
            name=group.role,
            group=group,
            loss=objective.loss if objective else None,
            train=train,
            seed=plan.run.seed,
            trained_from=objective.trained_from if objective else 0,
            rollout_steps=train.schedule.steps or plan.run.steps,
            next_optimizer_step=group.loaded_step,
        )
    if plan.start.state and plan.run.trains:
        trained = [role for role in roles.values() if role.loss is not None]
        for text in continue_schedules(plan.start.state, trained):
            notify(text)
    return roles


def continue_schedules(state: Mapping[str, Any], roles: Collection[Role]) -> list[str]:
    """Continue the schedules of the checkpoint whose `state` this is. Returns a line for each role whose next step has
    another learning rate than by the checkpoint's config."""
    for role in roles:
        if role.name in state.get("schedules", {}):
            role.decay_start = DecayStart(**state["schedules"][role.name])
    try:
        old = config_of(state["config"])
    except ConfigError:  # of a CoreRL with other settings: there is nothing to compare with
        return []
    lines = []
    for role in roles:
        if role.name not in old.chosen_roles:
            continue
        train = old.train_of(role.name)
        before = evolve(role, train=train, rollout_steps=train.schedule.steps or old.run.steps)
        role.keep_rate(train, state["rollout_step"])
        was, now = before.lr.at(role.next_optimizer_step), role.lr.at(role.next_optimizer_step)
        if not math.isclose(was, now, rel_tol=1e-6):
            line = f"{role.name}: the learning rate continues at {now:.3g}, not at {was:.3g}"
            if role.rollout_steps != before.rollout_steps:
                line += f"; its schedule spans {role.rollout_steps} rollout steps, not {before.rollout_steps}"
            lines.append(line)
    return lines
