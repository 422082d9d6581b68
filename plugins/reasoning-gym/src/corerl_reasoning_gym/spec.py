"""`[samplers.reasoning-gym]`, and what the driver knows of the sampler before a run; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import asdict, frozen

from corerl.config import above, at_least, finite, option
from corerl.plugin import Problem, SamplerRun, SamplerSpec


@frozen(kw_only=True)
class Task:
    """One of the tasks that questions are of."""

    name: str = option("a task of reasoning-gym", default="")
    weight: float = option(
        "share of the questions, relative to the other tasks", default=1.0, validator=[above(0), finite]
    )
    level: int | None = option(
        "difficulty: each attribute of the task's own curriculum at this level, counted from 0, or at its highest; "
        "unset: the task's defaults",
        default=None,
        validator=at_least(0),
    )
    options: Mapping[str, Any] = option("arguments of the task, before those of its level", factory=dict)


@frozen(kw_only=True)
class ReasoningGymConfig:
    tasks: tuple[str | Task, ...] = option(
        "tasks of reasoning-gym, each a name, or a table with its arguments", default=()
    )
    questions: int = option(
        "questions of all tasks together; one that a task asks again is left out", default=2000, validator=at_least(1)
    )
    seed: int = option("seed of the questions", default=0, validator=at_least(0))
    system: str = option(
        "the system message: one of reasoning-gym's by its name (default, simple, direct, chain_of_draft, "
        "DeepSeekZero), or a text; empty: none",
        default="default",
    )
    begin: str = option("the beginning of each answer, which the policy continues", default="")
    scored: Literal["tags", "text"] = option(
        "what is scored: what is between the last <answer> and </answer>, for which reasoning-gym's system messages "
        "ask, or the whole text; the beginning is part of it",
        default="tags",
    )
    chat: bool = option(
        "ask by messages, which the tokenizer's chat template encodes; false: by a text that ends with a line break",
        default=True,
    )


def tasks_of(options: ReasoningGymConfig) -> list[Task]:
    return [Task(name=each) if isinstance(each, str) else each for each in options.tasks]


def check(options: ReasoningGymConfig, run: SamplerRun) -> Iterator[Problem]:
    """Whether there are such tasks, and each takes its arguments."""
    from corerl_reasoning_gym.tasks import task_problem

    if not options.tasks:
        yield Problem("tasks", 'empty; name tasks of reasoning-gym, such as ["chain_sum", "gcd"]')
    for place, task in enumerate(tasks_of(options)):
        if found := task_problem(**asdict(task, filter=lambda field, _: field.name != "weight")):
            setting, text = found
            yield Problem(f"tasks[{place}]" + f".{setting}" * isinstance(options.tasks[place], Task), text)


def prompts(options: ReasoningGymConfig) -> list[dict[str, Any]]:
    from corerl_reasoning_gym.questions import rows

    return rows(options)


SPEC = SamplerSpec(
    implementation="corerl.rollout:PromptSampler",
    config=ReasoningGymConfig,
    api=(2, 2),
    summary="questions of reasoning-gym's tasks, scored by the tasks",
    check=check,
    prompts=prompts,
    reward="corerl_reasoning_gym.tasks:score",
)
