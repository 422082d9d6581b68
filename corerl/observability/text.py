"""Format numbers, durations and sampled answers as short texts."""

from __future__ import annotations

# Formats of metrics; all others have three decimals.
_FORMATS = {
    "train/loss": ".4f",
    "rollout/logprob_diff": ".1e",
    "rollout/response_length": ".1f",
    "perf/tokens_per_second": ",.0f",
}


def number(value: float | None, metric: str = "") -> str:
    """A number in at most nine characters, with fixed decimals per metric so that columns line up; `-` for None."""
    if value is None:
        return "-"
    text = format(value, _FORMATS.get(metric, ".3f"))
    return text if len(text) <= 9 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 3:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """The text with unprintable characters escaped, since a model may sample any character."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, width: int) -> str:
    """`printable`, cut to `width` characters."""
    line = printable(text)
    return line if len(line) <= width else line[: max(width - 3, 0)] + "..."
