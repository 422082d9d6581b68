"""Accumulate gradients of a rollout step's first optimizer step while prompts still arrive."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from attrs import define, evolve, field

from corerl.driver.advantages import TrainBatch
from corerl.driver.progress import Progress
from corerl.driver.roles import Role
from corerl.rollout.source import Arrived
from corerl.trainer.group import StoredBatch
from corerl.types import FloatArray, SampleBatch, offsets_of


@define(kw_only=True, eq=False)
class StreamedStep:
    """The prompts of one rollout step that are there already: they get the columns of the forward passes, and those of
    the first optimizer step their gradients. Later optimizer steps need the first one's weights, and wait for it."""

    step: int  # the rollout step
    trained: Role | None  # None if no role is trained in it
    with_passes: Callable[[SampleBatch], SampleBatch]  # adds the columns that advantages are computed from
    with_advantages: Callable[[SampleBatch, FloatArray], TrainBatch]
    progress: Progress

    _arrived: list[Arrived] = field(factory=list, init=False)  # whose batches have the columns of their passes
    # Of the first optimizer step:
    _denominator: float = field(default=0.0, init=False)  # so far
    _unit: float = field(default=0.0, init=False)  # of its token weights; 0 before the first call
    _has_gradients: bool = field(default=False, init=False)

    @property
    def scale(self) -> float | None:
        """What the first optimizer step multiplies its gradients by, once all have been added; None if it has none."""
        return self._unit / self._denominator if self._has_gradients else None

    def add(self, arrived: Arrived) -> None:
        """Returns once the ranks are done with these: prompts that come meanwhile are passed together."""
        samples = self.with_passes(arrived.batch)
        self._arrived.append(evolve(arrived, batch=samples))
        if (role := self.trained) is None:
            return
        first = role.groups_of_first_step(arrived.of, self.step)
        groups = np.flatnonzero(np.isin(arrived.prompts, first))
        if len(groups):
            rows = np.flatnonzero(np.isin(samples.row_columns["group"], groups))
            batch = self.with_advantages(samples.take_rows(rows), arrived.rewards[rows])
            self._add_gradients(role, batch.samples, fraction=len(groups) / len(first))

    def completed(self, samples: SampleBatch) -> SampleBatch:
        """The step's samples, all of which have been added, with the columns of their passes."""
        joined = SampleBatch.concatenate([each.batch for each in self._arrived])
        prompts = np.concatenate([each.prompts for each in self._arrived])
        firsts = offsets_of([len(each.prompts) for each in self._arrived])[:-1]
        first = np.repeat(firsts, [len(each.batch) for each in self._arrived])
        place = prompts[joined.row_columns["group"] + first]
        ordered = joined.take_rows(np.argsort(place, kind="stable"))
        return evolve(samples, columns=ordered.columns, pictures=ordered.pictures)

    def _add_gradients(self, role: Role, samples: SampleBatch, *, fraction: float) -> None:
        """`fraction`: of the first step's groups."""
        group, loss = role.group, role.loss
        assert loss is not None
        if not self._unit:
            _, count = group.plan_part(samples)
            # A power of two, which rounds nothing: how much comes first is chance.
            self._unit = 2.0 ** round(math.log2(count / fraction)) if count else 0.0
        plan, count = group.plan_part(samples, unit=self._unit or 1.0)
        self._denominator += count
        if samples.columns["loss_mask"].any():  # without, it may count all the same, by its length
            self._has_gradients = True
            with self.progress.phase("train"):
                group.forward_backward(StoredBatch(samples), plan, loss).result()
