"""What a task is asked and what an answer is worth, compared with reasoning-gym's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import reasoning_gym

from corerl.config import RewardConfig
from corerl.data import Prompt
from corerl.rollout import Failure, Judged
from corerl_reasoning_gym.questions import entries_of, row_of, sizes_of
from corerl_reasoning_gym.spec import SPEC, ReasoningGymConfig, Task
from corerl_reasoning_gym.tasks import config, score, task_problem
from tests.machine import paced
from tests.rollout.rewarding import outcomes_of


@pytest.mark.parametrize(
    ("task", "setting", "said"),
    [
        ({"name": "chain_sums"}, "name", "unknown task 'chain_sums'; did you mean 'chain_sum'?"),
        ({"name": "composite"}, "name", "unknown task 'composite'"),
        ({"options": {"max_term": 3}}, "options.max_term", "no argument of 'chain_sum'; did you mean 'max_terms'?"),
        ({"options": {"colour": 3}}, "options.colour", "known: min_terms, max_terms, min_digits"),
        ({"options": {"seed": 3}}, "options.seed", "set samplers.reasoning-gym.seed"),
        ({"options": {"min_terms": 9, "max_terms": 3}}, "options", "'chain_sum' refuses them: AssertionError: max_"),
        ({"name": "acre", "level": 1}, "level", "'acre' has no curriculum"),
    ],
)
def test_a_task_that_cannot_be_asked_says_why(task: dict[str, Any], setting: str, said: str) -> None:
    found = task_problem(**{"name": "chain_sum", "level": None, "options": {}, **task})
    assert found is not None and found[0] == setting and said in found[1]


def test_a_level_is_that_of_the_tasks_curriculum() -> None:
    assert task_problem(name="chain_sum", level=99, options={"max_terms": 99}) is None
    made = config("chain_sum", 2, {}, seed=5, size=7)
    assert (made.min_terms, made.max_terms, made.max_digits, made.seed, made.size) == (2, 4, 3, 5, 7)
    assert config("chain_sum", 99, {"max_terms": 5}, seed=0, size=1).max_terms == 5
    assert config("chain_sum", 99, {}, seed=0, size=1).max_terms == 12


def prompt_of(**options: Any) -> Prompt:
    given = ReasoningGymConfig(questions=1, **options)
    ((task, entry),) = entries_of(sizes_of(given), seed=0)
    row = row_of(task, entry, given)
    return Prompt(index=0, text="", answer=row["answer"], fields=row)


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "countdown", "leg_counting"])
def test_an_answer_is_scored_by_the_task_itself(task: str) -> None:
    prompt, theirs = prompt_of(tasks=(task,)), reasoning_gym.get_score_answer_fn(task)
    answer = prompt.answer
    for said in (answer, f"{answer} or so", "7", ""):
        assert score(prompt, f"I think <answer> {said} </answer>") == {task: theirs(said, prompt.fields)}
    assert score(prompt, f"<answer>{answer}</answer>") == {task: 1.0}
    assert score(prompt, f"<answer>no</answer> <answer>{answer}</answer>") == {task: 1.0}
    assert score(prompt, answer) == {task: theirs(None, prompt.fields)}


def test_the_beginning_counts_and_the_text_may_be_scored_whole() -> None:
    tagged = prompt_of(tasks=("gcd",), begin="<answer>")
    assert score(tagged, f"{tagged.answer}</answer>") == {"gcd": 1.0}
    whole = prompt_of(tasks=("gcd",), scored="text")
    assert score(whole, f" {whole.answer}\n") == {"gcd": 1.0}
    assert 0 < score(whole, f"It is {whole.answer}")["gcd"] < 1


def test_a_scorer_has_the_arguments_of_its_task() -> None:
    task = Task(name="sudoku", options={"min_empty": 30, "max_empty": 31})
    prompt = prompt_of(tasks=(task,))
    assert prompt.fields["asked"]["task"] == {"name": "sudoku", "level": None, "options": dict(task.options)}
    assert score(prompt, f"<answer>{prompt.answer}</answer>") == {"sudoku": 1.0}


@pytest.mark.processes
def test_a_scorer_that_never_ends_costs_its_sample() -> None:
    """That of `countdown` computes what the policy wrote."""
    prompt, config = prompt_of(tasks=("countdown",)), RewardConfig(name=SPEC.reward, processes=1, timeout=paced(2))
    said = [f"<answer>{text}</answer>" for text in (prompt.answer, "9**9**9**9", prompt.answer)]
    right, late, after = outcomes_of(config, [(prompt, text, ()) for text in said])
    assert right == after == Judged(reward=1.0, parts={"countdown": 1.0})
    assert isinstance(late, Failure) and late.kind == "timeout"
