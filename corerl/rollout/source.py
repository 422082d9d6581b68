"""What supplies the loop with scored rollout steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from corerl.rollout.scored import ScoredRollout
from corerl.types import FloatArray, IntArray, SampleBatch


@frozen(kw_only=True)
class Arrived:
    """Samples of some prompts, handed out before the step's others are there."""

    prompts: IntArray  # [n] their places in the step
    of: int  # prompts of the step
    batch: SampleBatch  # whose rows `group` count these prompts
    rewards: FloatArray  # [B]


@frozen(kw_only=True)
class Policies:
    """Which policy each version of the engines' weights holds, as a number: that of the version, less the repeats up to
    it. A version that is sent because engines were replaced or added repeats the policy of the version before."""

    version: int = 0  # the newest
    repeats: tuple[int, ...] = ()  # versions of the same policy as the version before, ascending

    def next(self, *, new: bool) -> Policies:
        """With one more version, of a `new` policy or of the same."""
        version = self.version + 1
        return evolve(self, version=version, repeats=self.repeats if new else (*self.repeats, version))

    def of(self, versions: IntArray) -> IntArray:
        """The policies [...] of these versions [...]. Each is one more than the policy before."""
        policies: IntArray = versions - np.searchsorted(self.repeats, versions, side="right")
        return policies

    @property
    def newest(self) -> int:
        """The newest policy."""
        return self.version - len(self.repeats)

    @property
    def since(self) -> int:
        """The first version of the newest policy."""
        version = self.version
        while version in self.repeats:
            version -= 1
        return version


class Source(ABC):
    """Rollout steps, one after the other. `next` and `arrived` are coroutines of the engines' event loop; all else is
    called in the thread that updates weights, while no `next` runs or all engines have died.

    A step counts as done once it is handed out: a resumed run continues from the `position`, and what `save` wrote,
    taken after that step was trained on.
    """

    @property
    def overlaps(self) -> bool:
        """Whether engines may generate while weights are trained, hence during an update."""
        return False

    @abstractmethod
    async def next(self) -> ScoredRollout | None:
        """The next step; None after the last one."""

    async def arrived(self) -> Arrived | None:
        """What has come of the next step since the last call, waiting for at least one prompt; None once all have been
        handed out, and `next` has them together, and where steps come whole."""
        return None

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""

    @abstractmethod
    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `position`; `checkpoint` is the directory that `save` wrote into. Raises CheckpointError if the
        data differ from the checkpoint's."""

    def renumber(self, updates: int) -> None:  # noqa: B027  -- most keep no samples
        """Called after `restore` with the number of weight updates since the checkpoint, which the restored run
        discards, including the push that follows. Add it to the versions of restored samples, which stay as many
        versions behind the weights as they were."""

    def save(self, checkpoint: Path) -> None:  # noqa: B027  -- most have nothing to add
        """Write the state that `position` does not hold. Raises DataError."""

    def updating(self, policies: Policies) -> AbstractContextManager[None]:
        """A context in which engines generate nothing; when it ends, they hold the last of the policies."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027  -- most do nothing by themselves
        """Stop sampling; returns at once."""
