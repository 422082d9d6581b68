"""Parse steps as a user writes them: "3", "3,20" or "10:100:10"."""

from __future__ import annotations

import re

from attrs import frozen

WRITTEN = re.compile(r"(\d+)(?::(\d+)(?::([1-9]\d*))?)?")


@frozen
class Chosen:
    """A set of steps, to be tested with `step in chosen`."""

    ranges: tuple[range, ...]

    def __contains__(self, step: int) -> bool:
        return any(step in each for each in self.ranges)


def step_ranges(text: str) -> Chosen:
    """Parse comma-separated steps and ranges FIRST:LAST:EVERY; LAST is included, '' means no steps.

    Raises ValueError for anything else.
    """
    ranges = []
    for part in filter(None, text.replace(" ", "").split(",")):
        match = WRITTEN.fullmatch(part)
        if match is None:
            raise ValueError(f"must be steps such as '3', '3,20' or '10:100:10', got {text!r}")
        first, last, every = match.groups()
        chosen = range(int(first), int(last or first) + 1, int(every or 1))
        if not chosen:
            raise ValueError(f"must be ranges FIRST:LAST:EVERY whose last step is not before the first, got {part!r}")
        ranges.append(chosen)
    return Chosen(tuple(ranges))
