"""Draw series as lines of braille characters, two by four dots per character."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

# The bit of each dot, by row and column within a character (Unicode block U+2800).
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@frozen
class Line:
    steps: Sequence[int]
    values: Sequence[float]  # one per step; values that are not finite are left out
    style: str


@frozen
class Plot:
    rows: list[list[tuple[str, str]]]  # [height][width] character and style, top row first
    low: float  # the value of the lowest dot
    high: float


def draw(lines: Sequence[Line], *, width: int, height: int) -> Plot:
    """Draw all lines over one range of steps and values. If lines share a character, the last one colors it."""
    finite = [[p for p in zip(line.steps, line.values, strict=True) if math.isfinite(p[1])] for line in lines]
    points = [point for line in finite for point in line]
    low = min((value for _, value in points), default=0.0)
    high = max((value for _, value in points), default=1.0)
    first = min((step for step, _ in points), default=0)
    last = max((step for step, _ in points), default=0)
    bits = [[0] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]

    def column(step: int) -> int:
        return round((step - first) / max(last - first, 1) * (2 * width - 1))

    def dot(x: int, value: float, style: str) -> None:
        y = round((high - value) / ((high - low) or 1.0) * (4 * height - 1))
        bits[y // 4][x // 2] |= _BITS[y % 4][x % 2]
        styles[y // 4][x // 2] = style

    for line, known in zip(lines, finite, strict=True):
        for step, value in known[:1]:
            dot(column(step), value, line.style)
        for (step, value), (next_step, next_value) in pairwise(known):
            start, stop = column(step), column(next_step)
            for x in range(start, stop + 1):
                share = (x - start) / (stop - start) if stop > start else 1.0
                dot(x, value + share * (next_value - value), line.style)
    rows = [
        [(chr(0x2800 + bit), style) for bit, style in zip(*row, strict=True)] for row in zip(bits, styles, strict=True)
    ]
    return Plot(rows, low, high)
