"""The rows of a config's tasks: how many of each, how they are asked, and that they are the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS

from corerl_reasoning_gym.questions import asked, entries_of, row_of, rows, shares_of, sizes_of, system_of
from corerl_reasoning_gym.spec import ReasoningGymConfig, Task

ROWS = """
import json, sys
from corerl_reasoning_gym.questions import rows
from corerl_reasoning_gym.spec import ReasoningGymConfig
found = rows(ReasoningGymConfig(tasks=tuple(json.loads(sys.argv[1])), questions=int(sys.argv[2])))
print(json.dumps([json.dumps(row) for row in found]))
"""
# Of these, questions or metadata differ between processes of reasoning-gym.
UNSTEADY = ["ransom_note", "list_functions", "isomorphic_strings", "word_ladder", "polynomial_multiplication"]


def rows_in_a_process(tasks: list[str], questions: int, *, hash_seed: str) -> list[str]:
    """The rows that a process with this hash seed has."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ROWS, json.dumps(tasks), str(questions)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_weights_share_out_the_questions() -> None:
    assert shares_of([1, 1, 2], 100) == [25, 25, 50]
    assert shares_of([1, 1, 1], 100) == [33, 34, 33]
    assert shares_of([0.1] * 7, 3) and sum(shares_of([0.1] * 7, 3)) == 3


def test_questions_are_those_of_the_task_each_once() -> None:
    both = ReasoningGymConfig(tasks=("gcd", Task(name="chain_sum", weight=3.0)), questions=40, seed=3)
    found = [row_of(*each, both) for each in entries_of(sizes_of(both), seed=3)]
    assert Counter(row["asked"]["task"]["name"] for row in found) == {"gcd": 10, "chain_sum": 30}
    theirs = reasoning_gym.create_dataset("gcd", seed=3, size=10)
    assert [(row["question"], row["answer"], row["metadata"]) for row in found[:10]] == [
        (entry["question"], entry["answer"], entry["metadata"]) for entry in theirs
    ]
    few = Task(name="count_bits", options={"max_n": 7})
    assert len(entries_of(sizes_of(ReasoningGymConfig(tasks=(few,), questions=100)), seed=0)) == 7


def test_a_question_is_a_chat_or_a_text() -> None:
    options = ReasoningGymConfig(tasks=("gcd",), questions=1, begin="<answer>")
    ((task, entry),) = entries_of(sizes_of(options), seed=0)
    row = row_of(task, entry, options)
    system = SYSTEM_PROMPTS["default"].strip()
    said = [(each["role"], each["content"]) for each in row["prompt"]]
    assert said == [("system", system), ("user", row["question"]), ("assistant", "<answer>")]
    assert system_of(ReasoningGymConfig(system="Be brief.")) == "Be brief."
    assert asked("Why?", system="", begin="", chat=True) == [{"role": "user", "content": "Why?"}]
    assert asked("Why?", system="Be brief.", begin="So", chat=False) == "Be brief.\nWhy?\nSo"


@pytest.mark.processes
def test_rows_are_the_same_in_every_process() -> None:
    here = [json.dumps(row) for row in rows(ReasoningGymConfig(tasks=tuple(UNSTEADY), questions=20))]
    assert len(set(here)) == 20
    assert rows_in_a_process(UNSTEADY, 20, hash_seed="7") == here


@pytest.mark.nightly
@pytest.mark.processes
def test_every_task_makes_the_same_rows_again() -> None:
    tasks = sorted(DATASETS.keys() - {"composite"})
    assert len(tasks) > 100
    first, second = (rows_in_a_process(tasks, 3 * len(tasks), hash_seed=seed) for seed in "12")
    assert first == second and len(first) > 2 * len(tasks)
