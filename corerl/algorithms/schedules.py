"""The learning rate of each optimizer step: a linear warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from corerl.errors import ConfigError

DECAYS = ("constant", "linear", "cosine")


def learning_rate(
    *, warmup_steps: int, decay: str, final_ratio: float, peak: float, step: int, total_steps: int
) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Warm-up: peak / warmup_steps at step 0, the peak at step warmup_steps - 1. From there it decays to
    peak * final_ratio at the last step, total_steps - 1, and stays there afterwards.
    """
    if decay not in DECAYS:
        raise ConfigError(f"train.schedule.decay: unknown decay {decay!r}; use one of {', '.join(DECAYS)}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    at_peak = max(warmup_steps - 1, 0)
    falling = total_steps - 1 - at_peak
    if decay == "constant" or falling <= 0:
        return peak
    progress = min((step - at_peak) / falling, 1.0)
    left = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (final_ratio + (1.0 - final_ratio) * left)
