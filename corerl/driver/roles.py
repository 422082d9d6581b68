"""A role on the driver: its ranks, their training settings and progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, fields, frozen

from corerl.algorithms.schedules import decayed, learning_rate
from corerl.calls import Future
from corerl.config.load import config_of
from corerl.config.schema import TrainConfig
from corerl.data.packing import StepPlan, groups_of_steps
from corerl.errors import ConfigError
from corerl.plan.plan import Plan
from corerl.trainer.group import TrainGroup
from corerl.trainer.shared import SharedBatch
from corerl.types import Array, InitResult, IntArray, LossSpec, Output, SampleBatch, Step, TrainResult


@frozen(kw_only=True)
class ScheduleState:
    """How far a learning-rate schedule was when a resume changed the number of optimizer steps per rollout batch."""

    optimizer_step: int
    rollout_step: int
    progress: float  # share of the decay


@define(kw_only=True)
class Role:
    """One role. `optimizer_step` advances as steps are started; each role counts its own."""

    name: str
    group: TrainGroup
    loss: LossSpec | None  # None if it is frozen: then it only passes samples
    train: TrainConfig
    seed: int
    first_step: int = 0  # the rollout step in which its training starts
    rollout_steps: int  # that the learning-rate schedule spans, those before `first_step` included
    optimizer_step: int  # the next step
    schedule_state: ScheduleState | None = None  # where the schedule continues

    def lr(self, optimizer_step: int) -> float:
        schedule = self.train.schedule
        return learning_rate(
            decay=schedule.decay,
            final_ratio=schedule.final_ratio,
            peak=self.train.optimizer.lr,
            **self._place(optimizer_step),
        )

    def _place(self, optimizer_step: int) -> dict[str, Any]:
        """Where an optimizer step is in the schedule."""
        schedule = self.schedule_state or ScheduleState(optimizer_step=0, rollout_step=self.first_step, progress=0.0)
        left = max(self.rollout_steps - schedule.rollout_step, 0) * self.steps_of_batch
        return {
            "warmup_steps": self.train.schedule.warmup_steps,
            "step": optimizer_step,
            "total_steps": schedule.optimizer_step + left,
            "start": schedule.optimizer_step,
            "progress": schedule.progress,
        }

    def go_on(self, before: TrainConfig, rollout_step: int) -> None:
        """Keep the learning rate of the next step where it was with the mini-batches and epochs of `before`, which the
        first rollout steps had."""
        earlier = evolve(self, train=evolve(self.train, mini_batches=before.mini_batches, epochs=before.epochs))
        if earlier.steps_of_batch != self.steps_of_batch and self.optimizer_step:
            progress = decayed(**earlier._place(self.optimizer_step))
            self.schedule_state = ScheduleState(
                optimizer_step=self.optimizer_step, rollout_step=rollout_step, progress=progress
            )

    @property
    def steps_of_batch(self) -> int:
        return self.train.mini_batches * self.train.epochs

    def restarted(self, init: InitResult) -> None:
        """Go on where the ranks, which have restarted, do."""
        self.optimizer_step = init.optimizer_step

    def step(self, rollout_step: int) -> Step:
        """The next optimizer step."""
        return Step(optimizer_step=self.optimizer_step, rollout_step=rollout_step, lr=self.lr(self.optimizer_step))

    def plan(self, samples: SampleBatch, rollout_step: int) -> list[StepPlan]:
        """The optimizer steps of this rollout batch: `steps_of_batch`, or fewer if it has too few groups."""
        return self.group.plan_steps(samples, seed=self._seed(rollout_step))

    def groups_of_first_step(self, groups: int, rollout_step: int) -> IntArray:
        """Which groups the first of these steps will train on, of a batch of so many."""
        return groups_of_steps(groups, self.train.mini_batches, self._seed(rollout_step))[0]

    def _seed(self, rollout_step: int) -> int:
        return self.seed * 1_000_003 + rollout_step

    def start(
        self,
        shared: SharedBatch,
        plans: Sequence[StepPlan],
        rollout_step: int,
        loss: LossSpec,
        *,
        begun: float | None = None,
    ) -> list[Future[TrainResult]]:
        """Start these optimizer steps of the batch `shared`; returns once their samples are in the object store. Steps
        without loss tokens are skipped: momentum and decay would move the weights without a gradient. `begun`: the
        scale of the first step's gradients, where ranks have them already."""
        started = []
        for number, plan in enumerate(plans):
            if not plan.scales.any():
                continue
            step = self.step(rollout_step)
            if begun is not None and not number:
                started.append(self.group.optimizer_step(step, scale=begun))
            else:
                started.append(self.group.train(shared, plan, loss, step))
            self.optimizer_step += 1
        return started

    def start_forward(
        self,
        shared: SharedBatch,
        samples: SampleBatch,
        outputs: tuple[Output, ...],
        *,
        weights: str = "",
        replay: bool = False,
    ) -> Future[dict[Output, Array]]:
        """Start one forward pass over all tokens. The result maps outputs to columns, which are 0 outside loss tokens,
        except that experts are given for every token."""

        def masked(found: Mapping[Output, Array]) -> dict[Output, Array]:
            mask = samples.columns["loss_mask"]
            return {
                output: column if output is Output.ROUTED_EXPERTS else np.where(mask, column, np.float32(0.0))
                for output, column in found.items()
            }

        return self.group.forward(samples, outputs, shared=shared, weights=weights, replay=replay).then(masked)


def roles_of(
    plan: Plan, groups: Mapping[str, TrainGroup], inits: Mapping[str, InitResult], *, notify: Callable[[str], None]
) -> dict[str, Role]:
    """The roles of groups that have started; if the run resumes, their schedules continue."""
    roles = {}
    for name, group in groups.items():
        objective, train = group.plan.objective, group.plan.train
        roles[name] = Role(
            name=group.role,
            group=group,
            loss=objective.loss if objective else None,
            train=train,
            seed=plan.run.seed,
            first_step=objective.first_step if objective else 0,
            rollout_steps=train.schedule.steps or plan.run.steps,
            optimizer_step=inits[name].optimizer_step,
        )
    if plan.start.state and plan.run.trains:
        trained = [role for role in roles.values() if role.loss is not None]
        for text in resume_schedules(plan.start.state, trained):
            notify(text)
    return roles


def resume_schedules(state: Mapping[str, Any], roles: Collection[Role]) -> list[str]:
    """Continue the schedules of the checkpoint whose `state` this is. One line for each role whose next step has
    another learning rate than by the checkpoint's config."""
    for role in roles:
        if (found := state.get("schedules", {}).get(role.name)) is not None:
            role.schedule_state = ScheduleState(**{each.name: found[each.name] for each in fields(ScheduleState)})
    try:
        old = config_of(state["config"])
    except ConfigError:  # of a CoreRL with other settings: there is nothing to compare with
        return []
    lines = []
    for role in roles:
        if role.name not in old.chosen_roles:
            continue
        train = old.train_of(role.name)
        steps = train.schedule.steps or old.run.steps
        was = evolve(role, train=train, rollout_steps=steps).lr(role.optimizer_step)
        as_long = evolve(role, rollout_steps=steps)
        for each in (role, as_long):
            each.go_on(train, state["rollout_step"])
        now = role.lr(role.optimizer_step)
        if math.isclose(was, now, rel_tol=1e-6):
            continue
        cure = ""
        if as_long.lr(role.optimizer_step) == was:
            table = old.train_table_of(role.name)
            cure = f", because the schedule spans {role.rollout_steps} rollout steps, not {steps}; set "
            cure += f"{table}.schedule.steps={steps} to keep it"
        lines.append(f"{role.name}: the learning rate continues at {now:.3g}, not at {was:.3g}{cure}")
    return lines
