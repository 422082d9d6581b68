"""Ratios, spreads and verdicts of a benchmark's rows, and the file with its machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import asdict, frozen

from benchmarks.report import (
    Comparison,
    Number,
    Report,
    add_fields,
    arguments,
    changed,
    finish,
    in_turns,
    table,
    tell,
)

# Round by round 0.5, 2.0 and 1.2: the median of ratios is none of the ratio of medians, 0.03 / 0.02.
STEP = Comparison(what="a step", against="a bare one", ours=[0.01, 0.04, 0.03], other=[0.02, 0.02, 0.025], target=1.1)
MEMORY = Number(what="memory", values=[2.0, 4.0, 3.0], unit="GB", target=3.0)
REPORT = Report(name="steps", size="three samples", comparisons=[STEP], numbers=[MEMORY], note="Nothing else.")


def test_a_ratio_is_the_median_over_rounds_of_neighbors() -> None:
    assert STEP.row() == [
        "a step / a bare one",
        "30 ms (10 to 40)",
        "20 ms (20 to 25)",
        "**1.20** (0.50 to 2.00)",
        "≤ 1.1",
        "**no**",
    ]


def test_a_number_is_compared_with_its_target() -> None:
    assert MEMORY.row() == ["memory", "3 GB (2 to 4)", "", "", "≤ 3", "yes"]
    assert Number(what="a call", values=[0.006], unit="s", target=5e-3).row() == [
        *("a call", "6 ms", "", "", "≤ 5 ms", "**no**")
    ]
    assert Number(what="a copy", values=[2.5], unit="s").row() == ["a copy", "2.5 s", "", "", "", ""]


def test_both_sides_take_turns_and_who_comes_first_changes() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    ours, other = in_turns(3, lambda number: side("ours", number), lambda number: side("other", 10.0 * number))
    assert order == ["ours", "other", "other", "ours", "ours", "other"]
    assert (ours, other) == ([0, 1, 2], [0.0, 10.0, 20.0])


@pytest.mark.processes  # git
def test_a_result_names_its_machine_commit_and_command(tmp_path: Path) -> None:
    finish(REPORT, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"CPU", "cores", "memory", "system", "commit", "command"} == found.pop("facts").keys()
    assert found == asdict(REPORT)


def test_a_table_has_a_row_for_each_comparison_and_number() -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table([REPORT]).splitlines()[2:]]
    assert cells == [["steps", *STEP.row()], ["steps", *MEMORY.row()]]


@frozen(kw_only=True)
class Case:
    ranks: int = 1
    share: float = 0.5
    split: bool = False
    kept: str = "as it is"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", Case(ranks=4)),
        ("--ranks 2 --split", Case(ranks=2, split=True)),
        ("--share 1", Case(ranks=4, share=1.0)),
    ],
)
def test_the_command_line_changes_fields_of_a_case(words: str, wanted: Case) -> None:
    command = arguments("", tiny=False)
    add_fields(command, Case, "ranks", "share", "split")
    assert changed(Case(ranks=4), command, command.parse_args(words.split())) == wanted


@pytest.mark.processes  # git
def test_the_newest_report_is_printed_and_all_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell("both", [Report(name="first", size="earlier"), REPORT], str(tmp_path / "found.json"))
    said, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "three samples" in said and table([REPORT]) in said and "earlier" not in said
    assert found["name"] == "both" and found["size"] == "earlier; three samples"
