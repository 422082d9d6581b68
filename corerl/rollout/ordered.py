"""Rollout steps in the order of the prompts, sampled on demand: whole steps, or prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from corerl.rollout.sampled import PromptTask, SampledRollouts
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Arrived
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
            rewards=np.concatenate([task.rewards for task in fresh]),
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
        if self.refill is not None:
            useful = sum(int(each.useful.sum()) for each in self._ready)
            if useful < self.prompts and len(self._ready) <= self.refill.max_replacements:
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
            counts={} if self.refill is None else self._counts(len(tasks), useful),
        )
        if self.refill is not None:
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
