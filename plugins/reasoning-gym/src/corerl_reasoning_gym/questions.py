"""Rows of a config's tasks, the same in every run.

Some tasks go through sets of strings, whose order depends on the process, or use Python's global random numbers. So
questions are made in a process of their own, with a fixed hash seed."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict

from corerl.errors import ConfigError
from corerl_reasoning_gym.tasks import dataset

if TYPE_CHECKING:
    from corerl_reasoning_gym.spec import ReasoningGymConfig

Sized = tuple[dict[str, Any], int]  # a task: its name, level and options; and how many questions


def rows(options: ReasoningGymConfig) -> list[dict[str, Any]]:
    """A row for each question. Raises ConfigError if a task makes no questions."""
    found = _made(sizes_of(options), seed=options.seed)
    return [row_of(task, entry, options) for task, entry in found]


def sizes_of(options: ReasoningGymConfig) -> list[Sized]:
    """The tasks with how many questions are made of each."""
    from corerl_reasoning_gym.spec import tasks_of

    tasks = [asdict(task) for task in tasks_of(options)]
    sizes = shares_of([task.pop("weight") for task in tasks], options.questions)
    return [(task, size) for task, size in zip(tasks, sizes, strict=True) if size]


def row_of(task: dict[str, Any], entry: dict[str, Any], options: ReasoningGymConfig) -> dict[str, Any]:
    """The prompt, what reasoning-gym says of the question, and in `asked` how it is scored."""
    prompt = asked(entry["question"], system=system_of(options), begin=options.begin, chat=options.chat)
    return {**entry, "prompt": prompt, "asked": {"task": task, "begin": options.begin, "scored": options.scored}}


def shares_of(weights: Sequence[float], total: int) -> list[int]:
    """`total` whole numbers in these proportions, of which no one is further from its share than 1."""
    ends = [round(total * sum(weights[: place + 1]) / sum(weights)) for place in range(len(weights))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def system_of(options: ReasoningGymConfig) -> str:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return str(SYSTEM_PROMPTS.get(options.system, options.system)).strip()


def asked(question: str, *, system: str, begin: str, chat: bool) -> str | list[dict[str, str]]:
    """The prompt, as messages or as a text."""
    if not chat:
        return "\n".join(filter(None, [system, question])) + "\n" + begin
    said = [("system", system), ("user", question), ("assistant", begin)]
    return [{"role": role, "content": content} for role, content in said if content]


def entries_of(tasks: Sequence[Sized], *, seed: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each task with each of its questions, those of one task different."""
    found = []
    for task, size in tasks:
        random.seed(seed)
        entries: dict[str, dict[str, Any]] = {}
        for entry in dataset(**task, seed=seed, size=size):
            entries.setdefault(entry["question"], entry)
        found += [(task, entry) for entry in entries.values()]
    return found


def _made(tasks: Sequence[Sized], *, seed: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """`entries_of` in a process of its own. Raises ConfigError with what that says."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "questions"
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__, str(file)],
            input=json.dumps([tasks, seed]),
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,  # some tasks print how far they are
            stderr=subprocess.PIPE,
            text=True,
        )
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["without a message"])[-1]
            raise ConfigError(f"samplers.reasoning-gym: making questions failed: {last}")
        found: list[tuple[dict[str, Any], dict[str, Any]]] = pickle.loads(file.read_bytes())
        return found


if __name__ == "__main__":
    asked_for, given_seed = json.load(sys.stdin)
    Path(sys.argv[1]).write_bytes(pickle.dumps(entries_of(asked_for, seed=given_seed)))
