"""The tasks of examples/smollm2: what is written is what can be answered, and an answer alone is worth most."""

from __future__ import annotations

import pytest

from corerl.data.prompts import Prompt
from examples.smollm2.tasks import reward


def asked(task: str, **fields: str) -> Prompt:
    return Prompt(index=0, text="", answer="", fields={**fields, "metadata": {"source_dataset": task}})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("7", 1.0),
        ("7.", 1.0),
        ("3 + 4 = 7", 1 / 5),
        ("It is **7**, I think", 1 / 5),
        ("8", 0.0),
        ("78", 0.0),
        ("", 0.0),
    ],
)
def test_a_right_word_among_n_is_worth_1_nth(response: str, expected: float) -> None:
    assert reward(asked("chain_sum", answer="7"), response) == pytest.approx(expected)
