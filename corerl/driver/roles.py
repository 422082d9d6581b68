"""A role on the driver: its ranks, their training settings and progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve

from corerl.algorithms.schedules import learning_rate
from corerl.calls import Future
from corerl.config.load import config_of
from corerl.config.schema import TrainConfig
from corerl.data.packing import StepPlan, groups_of_steps
from corerl.errors import ConfigError
from corerl.plan.plan import Plan
from corerl.trainer.group import SharedBatch, TrainGroup
from corerl.types import Array, InitResult, IntArray, LossSpec, Output, SampleBatch, Step, TrainResult


@define(kw_only=True)
class Role:
    """One role. `next_optimizer_step` advances as steps are started; each role counts its own."""

    name: str
    group: TrainGroup
    loss: LossSpec | None  # None if it is frozen: then it only passes samples
    train: TrainConfig
    seed: int
    first_step: int = 0  # the rollout step in which its training starts
    rollout_steps: int  # that the learning-rate schedule spans, those before `first_step` included
    next_optimizer_step: int

    def lr(self, optimizer_step: int) -> float:
        schedule = self.train.schedule
        return learning_rate(
            warmup_steps=schedule.warmup_steps,
            decay=schedule.decay,
            final_ratio=schedule.final_ratio,
            peak=self.train.optimizer.lr,
            step=optimizer_step,
            total_steps=max(self.rollout_steps - self.first_step, 0) * self.steps_of_batch,
        )

    @property
    def steps_of_batch(self) -> int:
        return self.train.mini_batches * self.train.epochs

    def step(self, rollout_step: int) -> Step:
        """The next optimizer step."""
        return Step(
            optimizer_step=self.next_optimizer_step, rollout_step=rollout_step, lr=self.lr(self.next_optimizer_step)
        )

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
        scale: float | None = None,
    ) -> list[Future[TrainResult]]:
        """Start these optimizer steps of the batch `shared`; returns once their samples are in the object store. Steps
        without loss tokens are skipped: momentum and decay would move the weights without a gradient. `scale`: that of
        the first step's gradients, where ranks have them already."""
        started = []
        for number, plan in enumerate(plans):
            if not plan.scales.any():
                continue
            step = self.step(rollout_step)
            if scale is not None and not number:
                started.append(self.group.optimizer_step(step, scale=scale))
            else:
                started.append(self.group.train(shared, plan, loss, step))
            self.next_optimizer_step += 1
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
    """The roles of groups that have started. If the run resumes with other learning rates, `notify` gets lines."""
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
            next_optimizer_step=inits[name].optimizer_step,
        )
    if plan.start.state and plan.run.trains:
        trained = [role for role in roles.values() if role.loss is not None]
        for text in changed_rates(plan.start.state, trained):
            notify(text)
    return roles


def changed_rates(state: Mapping[str, Any], roles: Collection[Role]) -> Iterator[str]:
    """A line for each role whose next step has another learning rate than by the config of the checkpoint whose `state`
    this is."""
    try:
        old = config_of(state["config"])
    except ConfigError:  # of a CoreRL with other settings: there is nothing to compare with
        return
    for role in roles:
        if role.name not in old.chosen_roles:
            continue
        train = old.train_of(role.name)
        before = evolve(role, train=train, rollout_steps=train.schedule.steps or old.run.steps)
        was, now = before.lr(role.next_optimizer_step), role.lr(role.next_optimizer_step)
        if not math.isclose(was, now, rel_tol=1e-6):
            yield (
                f"{role.name}: the learning rate continues at {now:.3g}, not at {was:.3g}; its schedule spans "
                f"{role.rollout_steps} rollout steps of {role.steps_of_batch} optimizer steps, where it had "
                f"{before.rollout_steps} of {before.steps_of_batch}"
            )
