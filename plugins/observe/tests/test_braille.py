from __future__ import annotations

import math

from corerl_observe.braille import Line, draw


def characters(lines: list[Line], *, width: int, height: int) -> list[str]:
    return ["".join(c for c, _ in row) for row in draw(lines, width=width, height=height).rows]


def test_a_rising_line_climbs_to_the_upper_right_dot() -> None:
    plot = draw([Line([0, 1], [0.0, 1.0], "red")], width=2, height=1)
    # Dots by column 0..3, counted from the top: rows 3, 2, 1, 0.
    assert plot.rows == [[(chr(0x2800 + 0x40 + 0x20), "red"), (chr(0x2800 + 0x02 + 0x08), "red")]]
    assert (plot.low, plot.high) == (0.0, 1.0)


def test_gaps_are_bridged_and_nothing_is_an_empty_plot() -> None:
    bridged = characters([Line([0, 1, 2], [0.0, math.nan, 0.0], "")], width=3, height=1)
    assert bridged == [chr(0x2800 + 0x01 + 0x08) * 3]
    assert characters([Line([], [], "")], width=3, height=2) == [chr(0x2800) * 3] * 2


def test_the_later_line_colors_a_shared_character() -> None:
    lines = [Line([0, 1], [0.0, 1.0], "red"), Line([0], [0.0], "blue")]
    assert [style for _, style in draw(lines, width=2, height=1).rows[0]] == ["blue", "red"]
