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


def decayed(*, warmup_steps: int, step: int, total_steps: int, start: int, progress: float) -> float:
    """The fraction of the decay at optimizer step `step`, from 0 to 1: it begins with the last step of the warm-up and
    ends with the last step, total_steps - 1. If the number of steps has changed on the way, it continues from
    `progress` at step `start`."""
    begin = max(warmup_steps - 1, start, 0)
    falling = total_steps - 1 - begin
    fraction = min(max(step - begin, 0) / falling, 1.0) if falling > 0 else 0.0
    return progress + (1.0 - progress) * fraction


def learning_rate(
    *,
    warmup_steps: int,
    decay: str,
    final_ratio: float,
    peak: float,
    step: int,
    total_steps: int,
    start: int = 0,
    progress: float = 0.0,
) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Warm-up: peak / warmup_steps at step 0, the peak at step warmup_steps - 1. From there it decays to
    peak * final_ratio at the last step, total_steps - 1, and stays there afterwards. `start` and `progress` are those
    of `decayed`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = decayed(warmup_steps=warmup_steps, step=step, total_steps=total_steps, start=start, progress=progress)
    if decay == "constant" or not done:
        return peak
    left = 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (final_ratio + (1.0 - final_ratio) * left)
