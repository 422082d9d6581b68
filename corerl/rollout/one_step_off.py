"""Rollout steps in the order of the prompts, each sampled while the one before is trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from corerl.errors import CorerlError
from corerl.rollout.ordered import OrderedRollouts
from corerl.rollout.recorded import file_of, read_rollout, write_rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Policies


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
        """Wait until the step in flight needs engines no more: not for its own prompts, nor for replacements."""
        self._raise_failure()
        sampled = self._wait(lambda: not self._sampling and (self.refill is None or self._enough()))
        if not await self.engines.until(sampled):  # no engine is left
            for task in [*self._in_flight.values()]:
                self._discard(task)
            self._ready, self._scores = [], []
            self.stream.restore(self._begins)
        self._raise_failure()

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
            batch = batch.with_columns(versions=batch.columns["versions"] + updates)
            self._complete = evolve(self._complete, rollout=evolve(self._complete.rollout, batch=batch))
