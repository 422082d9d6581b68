"""The learning rate of each optimizer step: a linear warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from corerl.errors import ConfigError

DECAYS = ("constant", "linear", "cosine")


def learning_rate(
    *,
    warmup_steps: int,
    decay: str,
    final_ratio: float,
    peak: float,
    step: int,
    total_steps: int,
) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Warm-up: peak / warmup_steps at step 0, the peak at step warmup_steps - 1. From there it decays to
    peak * final_ratio at the last step, total_steps - 1, and stays there afterwards.
    """
    if decay not in DECAYS:
        raise ConfigError(f"train.schedule.decay: unknown decay {decay!r}; use one of {', '.join(DECAYS)}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    begin = max(warmup_steps - 1, 0)
    falling = total_steps - 1 - begin
    done = min(max(step - begin, 0) / falling, 1.0) if falling > 0 else 0.0
    if decay == "constant" or not done:
        return peak
    left = 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (final_ratio + (1.0 - final_ratio) * left)
