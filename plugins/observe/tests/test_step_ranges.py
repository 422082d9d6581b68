from __future__ import annotations

import pytest

from corerl_observe.step_ranges import step_ranges


@pytest.mark.parametrize(
    ("text", "expected"), [("", []), ("3, 20", [3, 20]), ("2:4", [2, 3, 4]), ("0:10:5,12", [0, 5, 10, 12])]
)
def test_the_last_step_of_a_range_is_in_it(text: str, expected: list[int]) -> None:
    chosen = step_ranges(text)
    assert [step for step in range(30) if step in chosen] == expected


@pytest.mark.parametrize("text", ["x", "1:", "1:2:0", "-1", "1;2"])
def test_what_is_no_list_of_steps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"must be steps such as '3', '3,20' or '10:100:10', got '{text}'"):
        step_ranges(text)
    with pytest.raises(ValueError, match=r"whose last step is not before the first, got '100:3'"):
        step_ranges("5,100:3")  # not three steps from 100 on
