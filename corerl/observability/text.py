"""Format numbers, durations and sampled answers as short texts."""

from __future__ import annotations

TOKENS_PER_SECOND = "perf/tokens_per_second"
# Formats of metrics; all others have three decimals.
_FORMATS = {
    "train/loss": ".4f",
    "rollout/logprob_diff": ".1e",
    "rollout/response_length": ".1f",
    TOKENS_PER_SECOND: ",.0f",
}


def number(value: float | None, metric: str = "") -> str:
    """A number in at most nine characters, with fixed decimals per metric so that columns line up; `-` for None."""
    if value is None:
        return "-"
    form = _FORMATS.get(metric, ".3f")
    if metric == TOKENS_PER_SECOND and round(value, 1) < 10:
        form = ".1f"  # of a large model on CPUs the whole number says little
    text = format(value, form)
    return text if len(text) <= 9 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 3:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rough_duration(seconds: float) -> str:
    """Seconds as 0:07 or 12:34, from an hour on as 3h05: at most five characters below a hundred hours."""
    if round(seconds) < 3600:
        return duration(seconds)
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02}"
