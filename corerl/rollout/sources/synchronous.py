"""Sample each batch when it is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corerl.rollout.sources.base import BatchSampler, Scored, Source


class Synchronous(Source):
    """Sample each step on demand, with the weights the engines hold at that time. A resumed run draws the same samples
    as an uninterrupted one."""

    def __init__(self, draws: BatchSampler, *, steps: int) -> None:
        self._draws = draws
        self._steps = steps  # rollout steps in total, including those before a resume
        self._step = 0  # the next step

    async def next(self) -> Scored | None:
        if self._step >= self._steps:
            return None
        scored = await self._draws.batch(self._step)
        self._step += 1
        return scored

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step, and the position of the prompt stream."""
        return {"rollout_step": self._step, "prompts": self._draws.stream.position}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
