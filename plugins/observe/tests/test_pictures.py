from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.text import Text

from corerl.pictures import Picture, save_pictures
from corerl.plugin import SampleShown
from corerl.types import Array
from corerl_observe.pictures import Pictures, drawn, reduced


def noise(height: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("size", "cells"),
    [((24, 24), (24, 24)), ((3, 5), (3, 5)), ((48, 24), (24, 12)), ((32, 32), (24, 24)), ((25, 100), (6, 24))],
)
def test_cells_are_means_of_equal_blocks(size: tuple[int, int], cells: tuple[int, int]) -> None:
    pixels = noise(*size)
    # Each pixel as so many smaller ones that no block cuts one.
    fine = pixels.repeat(cells[0], axis=0).repeat(cells[1], axis=1).astype(np.float64)
    means = fine.reshape(cells[0], size[0], cells[1], size[1], 3).mean((1, 3))
    found = reduced(pixels)
    assert found.shape == (*cells, 3)
    assert np.abs(found - means).max() <= 0.5 + 1e-9


def colors(text: Text, console: Console) -> list[list[tuple[tuple[int, ...], tuple[int, ...] | None]]]:
    """Of each character of each line its two colours."""
    found: list[list[tuple[tuple[int, ...], tuple[int, ...] | None]]] = [[]]
    for segment in console.render(text, console.options.update(no_wrap=True)):
        for character in segment.text:
            if character == "\n":
                found.append([])
                continue
            style = segment.style or Style()
            assert character == "\u2580" and style.color is not None and style.color.triplet is not None
            below = style.bgcolor.triplet if style.bgcolor is not None else None
            found[-1].append((tuple(style.color.triplet), tuple(below) if below is not None else None))
    return [line for line in found if line]


@pytest.mark.parametrize("height", [6, 7])
def test_a_character_has_the_colours_of_two_cells(height: int) -> None:
    pixels = noise(height, 5)  # smaller than a drawing may be: each pixel is a cell
    lines = colors(drawn(pixels), Console(width=80))
    assert [len(line) for line in lines] == [5] * ((height + 1) // 2)
    for row, column in np.ndindex(height, 5):
        assert lines[row // 2][column][row % 2] == tuple(pixels[row, column].tolist())
    if height % 2:
        assert {below for _, below in lines[-1]} == {None}


def printed(tmp_path: Path, color_system: str, environment: dict[str, str]) -> str:
    """Three prompts of which the first shows two pictures, the second none and the third one."""
    pictures = [Picture(noise(48, 24, seed)) for seed in range(3)]
    save_pictures(pictures, tmp_path)
    names = [each.id[:16] for each in pictures]
    asked = {"prompt": "1+1?", "response": "2", "answer": "2", "reward": 1.0}
    answers = [SampleShown(**asked, pictures=own) for own in (names[:2], [], names[2:])]  # type: ignore[arg-type]
    how: dict[str, Any] = {"color_system": color_system, "_environ": environment}
    console = Console(file=io.StringIO(), force_terminal=True, width=80, **how)
    console.print(Pictures(answers, str(tmp_path)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_three_drawings_stand_side_by_side_above_their_files(tmp_path: Path) -> None:
    text = Text.from_ansi(printed(tmp_path, "truecolor", {}))
    *drawing, names = text.plain.rstrip("\n").splitlines()
    assert [line.split() for line in drawing] == [["\u2580" * 12] * 3] * 12  # 48 x 24 pixels in blocks of 2
    files = sorted(tmp_path.glob("pictures/*.png"))
    (*words,) = names.split()
    assert words[::2] == ["1", "1", "3"] and sorted(words[1::2]) == [path.name for path in files]
    # The first cells of the first line, from the file that stands below them.
    pixels = np.asarray(Image.open(tmp_path / "pictures" / words[1]))
    means = np.round(pixels.reshape(24, 2, 12, 2, 3).astype(np.float64).mean((1, 3)))
    for column in range(12):
        style = text.get_style_at_offset(Console(), column)
        assert style.color is not None and style.bgcolor is not None
        assert style.color.triplet == tuple(means[0, column]) and style.bgcolor.triplet == tuple(means[1, column])


@pytest.mark.parametrize(("color_system", "environment"), [("standard", {}), ("truecolor", {"NO_COLOR": "1"})])
def test_without_colours_the_files_are_listed(tmp_path: Path, color_system: str, environment: dict[str, str]) -> None:
    lines = Text.from_ansi(printed(tmp_path, color_system, environment)).plain.split("\n")
    assert "\u2580" not in "".join(lines)
    words = [line.split() for line in lines if line]
    assert [number for number, _ in words] == ["1", "1", "3"]
    assert all((tmp_path / path).is_file() for _, path in words)
