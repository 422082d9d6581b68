"""The tasks of examples/smollm2: what is written is what can be answered, and an answer alone is worth most."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.config.schema import DataConfig
from corerl.data.prompts import Prompt
from corerl.data.rows import load_prompts
from examples.smollm2.tasks import TASKS, reward, write


def test_each_question_is_written_once_with_its_answer(tmp_path: Path) -> None:
    write(tmp_path, questions=300)
    for task in TASKS:
        data = DataConfig(source=str(tmp_path / f"{task}.jsonl"), prompt_key="question", held_out=0)
        prompts = load_prompts(data, seed=0)
        every = [prompts.prompt(index) for index in range(len(prompts))]
        assert len({prompt.text for prompt in every}) == len(every) > 100
        assert [reward(prompt, f" {prompt.answer}\n") for prompt in every] == [1.0] * len(every)


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
