"""Rollout steps in the order of the prompts: sampled on demand, whole or prompt by prompt, or one step ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve, field

from corerl.errors import CorerlError
from corerl.rollout.recorded import file_of, read_rollout, write_rollout
from corerl.rollout.sampled import PromptTask, SampledRollouts
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Arrived, Policies
from corerl.types import BoolArray


@define(kw_only=True, eq=False)
class OrderedRollouts(SampledRollouts):
    """Step n consists of the n-th prompts of the stream. Its samples are a function of the seed and of the weights that
    engines hold when the step is sampled: here, once `next` wants it."""

    singly: bool = False  # each prompt is sampled and scored by itself, and `arrived` hands it out

    _begins: dict[str, Any] = field(factory=dict, init=False)  # where the prompts in flight begin
    _arrived: int = field(default=0, init=False)  # how many of the ready tasks `arrived` has handed out

    async def arrived(self) -> Arrived | None:
        if not self.singly or self._step >= self.steps:
            return None
        await self._until(lambda: len(self._ready) > self._arrived or self._arrived == len(self._in_flight))
        fresh = self._ready[self._arrived :]
        self._arrived += len(fresh)
        if not fresh:
            return None
        return Arrived(
            prompts=np.array([task.number for task in fresh]),
            of=len(self._in_flight),
            batch=Rollout.concatenate([task.rollout for task in fresh]).batch,
            rewards=np.concatenate([task.scores.rewards for task in fresh]),
        )

    def _start(self) -> None:
        if not self._in_flight:
            self._start_step(background=self.singly)

    def _start_step(self, *, background: bool, replacement: int = 0) -> None:
        """Start the next prompts: of the step, or those that replace groups that dynamic sampling drops, the
        `replacement`-th time. Their noise differs from that of the step, whose prompts they may be again."""
        if not replacement:
            self._begins = self.stream.position
        prompts = self.stream.take(self.prompts)
        request = self._request(prompts, noise_salt=replacement)
        if not self.singly:
            self._begin(PromptTask(number=replacement, prompts=prompts, request=request, background=background))
            return
        for number, prompt in enumerate(prompts):
            rows = request.take_rows(np.arange(self.samples) + number * self.samples)
            self._begin(PromptTask(number=number, prompts=[prompt], request=rows, background=background))

    def _keep(self, task: PromptTask) -> None:
        self._ready.append(task)
        if self.dynamic_sampling is not None:
            useful = sum(int(each.useful.sum()) for each in self._ready)
            if useful < self.prompts and len(self._ready) <= self.dynamic_sampling.max_replacements:
                self._start_step(background=task.background, replacement=len(self._ready))

    def _enough(self) -> bool:
        return len(self._ready) == len(self._in_flight)

    def _hand_out(self) -> ScoredRollout:
        tasks = sorted(self._ready, key=lambda task: task.number)
        sampling = sum(task.seconds for task in tasks)
        on_demand = {"rollout": sampling, "reward": self._waited - sampling}
        useful = np.concatenate([task.useful for task in tasks])
        scored = self._step_of(
            tasks,
            seconds=None if self.overlaps or self.singly else on_demand,
            counts={} if self.dynamic_sampling is None else self._counts(len(tasks), useful),
        )
        if self.dynamic_sampling is not None:
            scored = scored.take_prompts(np.argsort(~useful, kind="stable")[: self.prompts])
        self._ready, self._arrived = [], 0
        return scored

    def _counts(self, batches: int, useful: BoolArray) -> dict[str, int]:
        """The batches that were sampled for the step, and of their groups, those that it does not have."""
        count = int(useful.sum())
        return {
            "attempts": batches,
            "groups_set_aside": len(useful) - count,
            "groups_unused": max(count - self.prompts, 0),
            "groups_missing": max(self.prompts - count, 0),
        }

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step, and where its prompts begin."""
        return {"rollout_step": self._step, "prompts": self._begins if self._in_flight else self.stream.position}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """A checkpoint of another kind of source holds no more than this."""
        self.stream.restore(position["prompts"])
        self._step = position["rollout_step"]


@define(kw_only=True, eq=False)
class OneStepOffRollouts(OrderedRollouts):
    """As OrderedRollouts, but a step is sampled with the weights that engines hold when the step before is handed out.

    An update waits until all tokens of the next step are there, from one version. Checkpoints include that step,
    because they lack the weights that sampled it. If all engines die, it is discarded, and sampled on demand by those
    that replace them.
    """

    _complete: ScoredRollout | None = field(default=None, init=False)  # the next step, of a checkpoint or for one

    @property
    def overlaps(self) -> bool:
        return True

    async def next(self) -> ScoredRollout | None:
        scored = await super().next()
        if self._step < self.steps:
            try:
                self._start_step(background=True)
            except CorerlError as error:  # of one of its prompts: this step can be trained on all the same
                self._failure = self._failure or error
                self.stream.restore(self._begins)
        return scored

    def _start(self) -> None:
        if self._complete is None:
            super()._start()

    def _enough(self) -> bool:
        return self._complete is not None or super()._enough()

    def _hand_out(self) -> ScoredRollout:
        if self._complete is None:
            return super()._hand_out()
        scored, self._complete = self._complete, None
        return scored

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, policies: Policies) -> Iterator[None]:
        self.engines.loop.run(self._end_sampling())
        yield
        self.engines.loop.run(self._wake_next())

    async def _wake_next(self) -> None:
        self._changed.set()  # for a `next` that waits for a step that was discarded

    async def _end_sampling(self) -> None:
        """Wait until the step in flight needs engines no more: not for its own prompts, nor for replacements, nor as it
        has failed."""
        self._require_engines()
        sampled = self._wait(lambda: not self._sampling and (self.dynamic_sampling is None or self._enough()))
        if not await self.engines.until(sampled):  # no engine is left
            for task in [*self._in_flight.values()]:
                self._discard(task)
            self._ready, self._scores = [], []
            self.stream.restore(self._begins)
        self._require_engines()

    @property
    def position(self) -> dict[str, Any]:
        """As `OrderedRollouts.position`, after waiting for the step that is being sampled; if it is complete, also
        where the prompts of the step after it begin."""
        if self._next_step() is not None:
            return {"rollout_step": self._step, "prompts": self._begins, "sampled": self.stream.position}
        return super().position

    def _next_step(self) -> ScoredRollout | None:
        """The step that is being sampled, once it is complete. None if no step is being sampled, if that has failed,
        which `next` will raise, or if no engine is left to sample it."""
        if self._complete is None and self._in_flight:
            with contextlib.suppress(CorerlError):
                self._complete = self.engines.loop.run(self._completed())
        return self._complete

    async def _completed(self) -> ScoredRollout | None:
        complete = self._enough() or await self.engines.until(self._wait(self._enough))
        return self._hand_out() if complete and self._failure is None else None

    def save(self, checkpoint: Path) -> None:
        """Write the step that is being sampled; waits until it is scored."""
        if (scored := self._next_step()) is not None:
            write_rollout(checkpoint, scored)

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """A checkpoint of another kind of source has no sampled step, and one of other data none to train on; then its
        weights sample the first one."""
        same_data = self.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        if same_data and "sampled" in position and checkpoint is not None:
            self._begins = self.stream.position
            self._complete = read_rollout(file_of(checkpoint, self._step))
            self.stream.restore(position["sampled"])

    def renumber(self, updates: int) -> None:
        if self._complete is not None:
            batch = self._complete.rollout.batch
            batch = batch.with_columns(versions=batch.columns["versions"] + updates * batch.columns["loss_mask"])
            self._complete = evolve(self._complete, rollout=evolve(self._complete.rollout, batch=batch))
