"""`tasks.py DIRECTORY` writes questions of two of reasoning-gym's tasks; its scorers say what a response is worth."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import reasoning_gym

if TYPE_CHECKING:
    from corerl.data import Prompt

BEGUN = "The answer is:"  # else a model of this size talks around it
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 4},
}


def write(directory: Path, *, questions: int = 1000, seed: int = 0) -> None:
    """A file for each task: in each line a chat whose answer is begun, the answer, and what its scorer wants to know.

    No question stands there twice: one that is held out is not among those that are trained on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, options in TASKS.items():
        made = reasoning_gym.create_dataset(name, size=questions, seed=seed, **options)
        rows = {row["question"]: {"prompt": chat(row["question"]), **row} for row in made}
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        print(f"{path}: {len(rows)} questions")


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": BEGUN}]


@cache
def scorer(task: str) -> Callable[[str, object], float]:
    return reasoning_gym.get_score_answer_fn(task)


def reward(prompt: Prompt, response: str) -> float:
    """1 for the answer alone, 1/n for an answer among n words, else 0."""
    score = scorer(prompt.fields["metadata"]["source_dataset"])
    words = response.split()
    right = any(score(word.strip(".,:;!?*"), prompt.fields) == 1.0 for word in words)
    return right / len(words) if right else 0.0


if __name__ == "__main__":
    write(Path(sys.argv[1]))
