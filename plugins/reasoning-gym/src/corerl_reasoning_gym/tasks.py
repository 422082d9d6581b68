"""What reasoning-gym's tasks are asked: whether one takes its arguments, its data set, and what an answer is worth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
from reasoning_gym.utils import extract_answer

from corerl.data import Prompt
from corerl.messages import did_you_mean, listed, one_line

LISTED = 400  # characters of a list of names in a message
MIXES = "composite"  # a data set of others: several tasks are mixed by their weights
OURS = ("seed", "size")


def task_problem(*, name: str, level: int | None, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The setting of a task that cannot be used, and why; None if the task can be asked."""
    if name == MIXES or name not in DATASETS:
        known = sorted(DATASETS.keys() - {MIXES})
        near = did_you_mean(name, known)
        return "name", f"unknown task {name!r}{near or '; known: ' + listed(known, LISTED)}"
    if level is not None and name not in CURRICULA:
        return "level", f"{name!r} has no curriculum; set its options instead"
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in OURS]
    for option in options:
        if option in OURS:
            return f"options.{option}", "is that of all tasks; set samplers.reasoning-gym.seed or .questions"
        if option not in known:
            return (
                f"options.{option}",
                f"no argument of {name!r}{did_you_mean(option, known) or '; known: ' + ', '.join(known)}",
            )
    try:
        config(name, level, options, seed=0, size=1)
    except Exception as error:  # an assertion of the task's own, mostly
        return "options" if options else "level", f"{name!r} refuses them: {one_line(error)}"
    return None


def config(name: str, level: int | None, options: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """The task's own config, an instance of its dataclass. Raises what its validation raises."""
    own = {"seed": seed, "size": size}
    if level is None:
        made = DATASETS[name][1](**own, **options)
    else:
        curriculum = create_curriculum(name)
        for attribute, definition in curriculum.attributes.items():
            curriculum.set_attr_level(attribute, min(level, len(definition.levels) - 1))
        made = replace(curriculum.generate_configuration(own), **options)
    if hasattr(made, "validate"):
        made.validate()
    return made


def dataset(name: str, level: int | None, options: Mapping[str, Any], *, seed: int, size: int) -> ProceduralDataset:
    return DATASETS[name][0](config(name, level, options, seed=seed, size=size))


@cache
def _scorer(task: str) -> ProceduralDataset:
    """The data set of a task as JSON, whose arguments some scorers read."""
    return dataset(**json.loads(task), seed=0, size=1)


def score(prompt: Prompt, response: str) -> dict[str, float]:
    """What the task's own scorer says of the answer, from 0 to 1, by the task's name: each task has its mean."""
    asked = prompt.fields["asked"]
    text = asked["begin"] + response
    answer = extract_answer(text) if asked["scored"] == "tags" else text.strip()
    return {asked["task"]["name"]: float(_scorer(json.dumps(asked["task"])).score_answer(answer, prompt.fields))}
