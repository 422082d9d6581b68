"""Ratios, spreads and verdicts of a benchmark's rows, and its way through a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import Comparison, Number, Report, document, finish, in_turns, load, table

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


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    finish(REPORT, str(tmp_path / "found.json"))
    assert load(tmp_path / "found.json") == REPORT


@pytest.mark.processes
def test_the_result_file_names_machine_versions_commit_command_and_what_failed() -> None:
    text = document([REPORT], command="python -m benchmarks.run", failures={"packing": "ended with 1"}, load_before=0.5)
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.count("|") == 3]
    found = {name: value for _, name, value, _ in cells}
    assert {"CPU", "cores", "memory", "system", "versions", "commit"} < found.keys()
    assert found["load average before"] == "0.50"
    assert found["command"] == "`python -m benchmarks.run`"
    assert table([REPORT]) in text
    assert "**packing failed**: ended with 1" in text
    assert text.endswith("- **steps** (three samples). Nothing else.\n")
