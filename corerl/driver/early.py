"""Begin with the prompts of a rollout step that are there while others are sampled: with their forward passes, and with
the gradients of the first optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, evolve, field

from corerl.driver.advantages import TrainBatch
from corerl.driver.progress import Progress
from corerl.driver.roles import Role
from corerl.rollout.sources.base import Arrived, Scored
from corerl.trainer.group import TrainGroup
from corerl.trainer.shared import SharedBatch
from corerl.types import FloatArray, IntArray, LossSpec, SampleBatch, offsets_of


@define(kw_only=True, eq=False)
class Early:
    """What has begun of one rollout step. Its later optimizer steps need the first one's weights, and wait for it."""

    step: int  # the rollout step
    training: tuple[Role, LossSpec] | None  # None if no role is trained in it
    passed: Callable[[SampleBatch], SampleBatch]  # adds the columns that advantages are computed from
    estimated: Callable[[SampleBatch, FloatArray], TrainBatch]
    progress: Progress

    _numbers: list[IntArray] = field(factory=list, init=False)  # of each part, the prompts' places in the step
    _parts: list[SampleBatch] = field(factory=list, init=False)  # with the columns of their passes
    # Of the first optimizer step:
    _denominator: float = field(default=0.0, init=False)  # so far
    _unit: float = field(default=0.0, init=False)  # of its token weights; 0 before the first call
    _begun: bool = field(default=False, init=False)  # whether the ranks have gradients

    @property
    def scale(self) -> float | None:
        """What the first optimizer step multiplies its gradients by, once all have been added; None if it has none."""
        return self._unit / self._denominator if self._begun else None

    def add(self, arrived: Sequence[Arrived]) -> None:
        """Returns once the ranks are done with these: prompts that come meanwhile are passed together."""
        scored = Scored.concatenate([each.scored for each in arrived])
        numbers = np.array([each.number for each in arrived])
        samples = self.passed(scored.rollout.batch)
        self._numbers.append(numbers)
        self._parts.append(samples)
        if self.training is None:
            return
        role, loss = self.training
        first = role.groups_of_first_step(arrived[0].of, self.step)
        groups = np.flatnonzero(np.isin(numbers, first))
        if len(groups):
            rows = np.flatnonzero(np.isin(samples.rows["group"], groups))
            batch = self.estimated(samples.take(rows), scored.rewards[rows])
            self._add_gradients(role.group, batch.samples, loss, share=len(groups) / len(first))

    def whole(self, samples: SampleBatch) -> SampleBatch:
        """The step's samples, all of which have been added, with the columns of their passes."""
        joined = SampleBatch.concatenate(self._parts)
        firsts = np.repeat(
            offsets_of([len(numbers) for numbers in self._numbers])[:-1], [len(part) for part in self._parts]
        )
        number_of = np.concatenate(self._numbers)[joined.rows["group"] + firsts]
        return evolve(samples, columns=joined.take(np.argsort(number_of, kind="stable")).columns)

    def _add_gradients(self, group: TrainGroup, samples: SampleBatch, loss: LossSpec, *, share: float) -> None:
        """`share`: of the first step's groups."""
        if not self._unit:
            _, count = group.plan_part(samples)
            # A power of two, which rounds nothing: how much comes first is chance.
            self._unit = 2.0 ** round(math.log2(count / share)) if count else 0.0
        plan, count = group.plan_part(samples, unit=self._unit or 1.0)
        self._denominator += count
        if samples.columns["loss_mask"].any():  # without, it may count all the same, by its length
            self._begun = True
            with self.progress.phase("train"):
                group.forward_backward(SharedBatch(samples), plan, loss).result()
