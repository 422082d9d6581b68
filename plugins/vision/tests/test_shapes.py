"""Generated rows are the same everywhere, and their answers are what their pictures show."""

from __future__ import annotations

from collections import Counter

import numpy as np

from corerl_vision.files import file_of, pixels_of
from corerl_vision.shapes import CELL, CELLS, COLOURS, SHAPES, ShapesOptions, rows


def test_answers_are_counts_of_cells_in_pictures() -> None:
    for row in (rows(ShapesOptions(kinds=9))[index] for index in range(50)):
        colour, shape = row["prompt"].removeprefix("<image>").removesuffix("=")
        file = file_of(row["images"][0], root="", max_bytes=1e6, max_pixels=1e6)
        cells = pixels_of(file).reshape(CELLS, CELL, CELLS, CELL, 3).swapaxes(1, 2).reshape(-1, CELL, CELL, 3)
        wanted = np.where(SHAPES[shape][..., None], COLOURS[colour], 255)
        assert sum(bool((cell == wanted).all()) for cell in cells) == int(row["answer"])


def test_answers_are_equally_frequent() -> None:
    counts = Counter(row["answer"] for row in (rows(ShapesOptions())[index] for index in range(1000)))
    assert sorted(counts) == list("01234")
    assert min(counts.values()) > 150


def test_shuffled_rows_show_the_next_rows_picture() -> None:
    own, shuffled = rows(ShapesOptions(rows=3)), rows(ShapesOptions(rows=3, shuffled=True))
    for index in range(3):
        assert shuffled[index]["prompt"] == own[index]["prompt"]
        assert shuffled[index]["answer"] == own[index]["answer"]
        assert shuffled[index]["images"] == own[(index + 1) % 3]["images"]


def test_questions_ask_for_as_many_kinds_as_are_set() -> None:
    for kinds in (1, 3):
        assert len({rows(ShapesOptions(kinds=kinds))[index]["prompt"] for index in range(50)}) == kinds
