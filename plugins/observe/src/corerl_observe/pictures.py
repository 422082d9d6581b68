"""Draw the pictures of shown prompts with half blocks, two cells in each character, one above the other.

Axes: H rows and W columns of pixels, h rows and w columns of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
from attrs import frozen
from PIL import Image
from rich.color import Color
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.style import Style
from rich.text import Text

from corerl.pictures import PICTURES
from corerl.plugin import SampleShown
from corerl.types import Array

CELLS = 24  # the most on either side of a drawing
UPPER_HALF = "\u2580"


@frozen
class Pictures:
    """The pictures of answers' prompts, each with its prompt's number and its file's name; where the terminal has fewer
    than 256 colours only these."""

    answers: Sequence[SampleShown]
    run_dir: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        files = [
            (number, Path(self.run_dir) / PICTURES / f"{name}.png")
            for number, answer in enumerate(self.answers, start=1)
            for name in answer.pictures
        ]
        if console.no_color or console.color_system not in ("256", "truecolor"):
            for number, path in files:
                yield Text(f"{number}  {PICTURES}/{path.name}", style="dim")
            return
        named = [
            Group(drawn(np.asarray(Image.open(path).convert("RGB"))), Text(f"{number}  {path.name}", style="dim"))
            for number, path in files
        ]
        yield Columns(named, padding=(0, 2))


def drawn(pixels: Array) -> Text:
    """A line of text for two rows of cells of `pixels`, [H, W, 3] uint8."""
    cells, text = reduced(pixels).tolist(), Text(no_wrap=True)
    for line, (upper, lower) in enumerate(zip_longest(cells[::2], cells[1::2])):
        text.append("\n" * bool(line))
        for color, below in zip(upper, lower or [None] * len(upper), strict=True):
            text.append(UPPER_HALF, Style(color=_color(color), bgcolor=below and _color(below)))
    return text


def _color(channels: Sequence[int]) -> Color:
    return Color.from_rgb(*channels)


def reduced(pixels: Array) -> Array:
    """[h, w, 3] uint8 the means of equal blocks of `pixels`, [H, W, 3] uint8: `CELLS` blocks along the longer side, or
    one for each pixel if there are fewer. A pixel that is cut by the edge of a block counts by its share."""
    H, W, _ = pixels.shape
    h, w = (max(1, round(length * CELLS / max(H, W, CELLS))) for length in (H, W))
    means = np.einsum("hH,wW,HWc->hwc", _shares(H, h), _shares(W, w), pixels, optimize=True)
    return means.round().astype(np.uint8)


def _shares(length: int, cells: int) -> Array:
    """[cells, length] the weight of each pixel in each cell's mean."""
    edges, pixels = np.linspace(0, length, cells + 1), np.arange(length)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return covered.clip(0) * cells / length
