"""Generated pictures to count in: 4 x 4 cells of shapes, and the question how many are of one kind."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from corerl.config import at_least, between, option

CELL = 8  # pixels of its sides
CELLS = 4  # of a picture's sides
MOST = 4  # shapes of the kind that is asked for; all numbers from 0 on are equally frequent
COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 230)}
_x, _y = np.meshgrid(np.arange(CELL), np.arange(CELL))
SHAPES = {  # which pixels of a cell they cover
    "s": (_x >= 1) & (_x <= 6) & (_y >= 1) & (_y <= 6),
    "c": (_x - 3.5) ** 2 + (_y - 3.5) ** 2 <= 9.5,
    "t": (_y >= 1) & (_y <= 6) & (abs(_x - 3.5) <= _y / 2),
}
KINDS = tuple(colour + shape for colour in COLOURS for shape in SHAPES)


@frozen(kw_only=True)
class ShapesOptions:
    """How many pictures, and whether they belong to their questions."""

    rows: int = option("number of pictures", default=8192, validator=at_least(1))
    kinds: int = option(
        f"how many of the {len(KINDS)} kinds of shapes questions ask for; the more, the longer a model learns",
        default=1,
        validator=between(1, len(KINDS)),
    )
    shuffled: bool = option(
        "show each question another one's picture: nothing can then be learned but the frequency of answers",
        default=False,
    )


def rows(options: ShapesOptions) -> Sequence[Mapping[str, Any]]:
    """The rows of a run: `<image>rs=` asks for the number of red squares."""
    return Rows(options)


@frozen
class Rows(Sequence[Mapping[str, Any]]):
    """Generated when they are asked for; row i is the same in every run."""

    options: ShapesOptions

    def __len__(self) -> int:
        return self.options.rows

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        asked, cells = self._cells(index)
        shown = self._cells((index + 1) % len(self))[1] if self.options.shuffled else cells
        return {"prompt": f"<image>{asked}=", "answer": str(cells.count(asked)), "images": [png(draw(shown))]}

    def _cells(self, index: int) -> tuple[str, list[str]]:
        """The kind that row `index` asks for, and what is in each cell of its picture, "" for nothing."""
        rng = np.random.default_rng([7, index])
        asked = KINDS[rng.integers(self.options.kinds)]
        others = ["", "", "", *(kind for kind in KINDS if kind != asked)]
        count = int(rng.integers(MOST + 1))
        cells = [asked] * count + [others[each] for each in rng.integers(len(others), size=CELLS**2 - count)]
        return asked, [cells[place] for place in rng.permutation(CELLS**2)]


def draw(cells: Sequence[str]) -> Any:
    """[32, 32, 3] uint8 of the kinds in its cells, row by row, on white."""
    side = CELL * CELLS
    picture = np.full((side, side, 3), 255, np.uint8)
    for place, kind in enumerate(cells):
        if kind:
            top, left = CELL * (place // CELLS), CELL * (place % CELLS)
            picture[top : top + CELL, left : left + CELL][SHAPES[kind[1]]] = COLOURS[kind[0]]
    return picture


def png(pixels: Any) -> bytes:
    """A file of pixels [H, W, 3]."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()
