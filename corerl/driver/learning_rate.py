"""The learning rate of an optimizer step: warm-up, then a decay, which goes on where a resumed run left it."""

from __future__ import annotations

import math

from attrs import frozen


@frozen(kw_only=True)
class DecayStart:
    """Where the decay of a learning rate continues, after a resume with other mini-batches or epochs."""

    optimizer_step: int
    rollout_step: int
    progress: float  # fraction of the decay that lies behind


@frozen(kw_only=True)
class LearningRate:
    """The learning rate of each optimizer step, counted from 0.

    Warm-up: peak / warmup_steps at step 0, the peak at step warmup_steps - 1. From there it decays to
    peak * final_ratio at the last step, total_steps - 1, and stays there afterwards. If the number of steps has changed
    on the way, it continues from `progress` at step `start`.
    """

    warmup_steps: int
    decay: str
    final_ratio: float
    peak: float
    total_steps: int
    start: int = 0
    progress: float = 0.0  # the fraction of the decay at `start`

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = self.decayed(step)
        if self.decay == "constant" or not done:
            return self.peak
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.final_ratio + (1.0 - self.final_ratio) * left)

    def decayed(self, step: int) -> float:
        """The fraction of the decay at this step, from 0 to 1: it begins with the last step of the warm-up."""
        begin = max(self.warmup_steps - 1, self.start, 0)
        falling = self.total_steps - 1 - begin
        fraction = min(max(step - begin, 0) / falling, 1.0) if falling > 0 else 0.0
        return self.progress + (1.0 - self.progress) * fraction
