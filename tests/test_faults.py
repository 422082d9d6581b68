"""Faults that are planted are those that were meant, each in one place."""

from __future__ import annotations

import textwrap

from fuzz.faults import faults_of, planted

SOURCE = textwrap.dedent(
    '''
    from __future__ import annotations

    LIMIT: Literal[3] = 7


    def first(rows, most=2, *, strict=True) -> dict[1, 2]:
        """1 < 2"""
        if len(rows) < most and strict:
            raise ValueError(f"{len(rows) < 1}", 5 > 4)
        rows.total += 1
        return max(rows, most)
    '''
)


def test_each_place_has_its_faults_and_messages_and_annotations_none() -> None:
    lines = SOURCE.splitlines()
    found = set()
    for fault in faults_of("a.py", SOURCE):
        changed = planted(SOURCE, fault).splitlines()
        assert len(changed) == len(lines)
        (line,) = (each for each, before in zip(changed, lines, strict=True) if each != before)
        found.add((fault.kind, line.strip()))
    assert found == {
        ("constant changed", "LIMIT: Literal[3] = 8"),
        ("default changed", "def first(rows, most=3, *, strict=True) -> dict[1, 2]:"),
        ("default changed", "def first(rows, most=2, *, strict=False) -> dict[1, 2]:"),
        ("condition negated", "if (not (len(rows) < most and strict)):"),
        ("and/or swapped", "if (len(rows) < most or strict):"),
        ("comparison flipped", "if (len(rows) <= most) and strict:"),
        ("statement dropped", "pass"),
        ("constant changed", "rows.total += 2"),
        ("arguments swapped", "return max(most, rows)"),
    }


def test_code_at_import_has_no_lines_and_defaults_the_bodys() -> None:
    lines = {fault.kind: fault.lines for fault in faults_of("a.py", SOURCE) if "LIMIT" in planted(SOURCE, fault)}
    by_text = {fault.text: fault.lines for fault in faults_of("a.py", SOURCE)}
    assert lines and by_text["8"] == range(0)
    assert by_text["3"] == range(8, 13)
