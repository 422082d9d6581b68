"""The reward of examples/gsm8k-qwen3-0.6b.toml, on rows made up in GSM8K's form."""

from __future__ import annotations

from decimal import Decimal

import pytest

from corerl.data.prompts import Prompt
from examples.gsm8k import final_number, reward

WORKED = (
    "Ada bakes 3 trays of 14 rolls, which are 3 * 14 = <<3*14=42>>42 rolls.\n"
    "She sells each at $25, so she earns 42 * 25 = $<<42*25=1050>>1,050.\n#### 1,050"
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (WORKED, "1050"),
        ("7 and 8 make 15", "15"),
        ("The answer is: 12, since 4 * 3 = 12 and not 13", "12"),
        (r"so \boxed{-3.5} degrees, not 4", "-3.5"),
        ("#### 5\nno, wait\n#### 6\nof 9", "6"),
        ("it costs $1,234.50.", "1234.50"),
        ("half, that is .5", "0.5"),
        ("at 18.", "18"),
    ],
)
def test_the_number_that_is_marked_counts_else_the_last_one(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


def test_a_text_without_a_number_has_none() -> None:
    assert final_number("I do not know") is None
    assert final_number("####") is None


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("#### 1050", 1.0),
        ("Ada earns $1,050.00.", 1.0),
        ("#### 1051", 0.1),
        ("perhaps 1051", 0.0),
        ("1050 or rather 12", 0.0),
        ("", 0.0),
    ],
)
def test_a_right_number_is_worth_1(response: str, expected: float) -> None:
    assert reward(Prompt(index=0, text="How much?", answer=WORKED), response) == expected
