import json
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.data.prompts import Prompt
from corerl.errors import ConfigError, RewardError
from corerl.rollout.rewards import Failure, Reward, exact_match, require_any_thread, resolve_reward
from corerl.rollout.sampler import Rollout
from corerl.types import SampleBatch

SORT = Prompt(index=35018, text="35018>", answer="01358")


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module of the user's."""
    module = ModuleType("my_rewards")
    monkeypatch.setitem(__import__("sys").modules, "my_rewards", module)
    return module


def rollout(texts: list[str], groups: list[int], prompts: tuple[Prompt, ...]) -> Rollout:
    batch = SampleBatch(
        tokens=np.zeros(len(texts), dtype=np.int64),
        offsets=np.arange(len(texts) + 1),
        rows={"group": np.array(groups)},
    )
    return Rollout(batch=batch, prompts=prompts, texts=texts)


@pytest.mark.parametrize(
    ("response", "position", "exact"),
    [("01358", 1.0, 1.0), ("01385", 3 / 5, 0.0), ("013", 3 / 5, 0.0), ("0135889", 5 / 7, 0.0), ("", 0.0, 0.0)],
)
def test_built_in_rewards_count_right_positions_over_the_longer_text_and_exact_answers(
    response: str, position: float, exact: float
) -> None:
    assert resolve_reward("position-match", {})(SORT, response) == pytest.approx(position)
    assert resolve_reward("exact-match", {})(SORT, response) == exact


def test_scores_follow_the_samples_to_their_own_prompts() -> None:
    other = Prompt(index=7, text="00007>", answer="00007")
    both = rollout(["01358", "00007", "00007", "01357"], [0, 0, 1, 1], (SORT, other))
    assert resolve_reward("exact-match", {}).score(both).rewards.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_reward_of_ones_own_is_imported_and_given_its_options(mine: ModuleType) -> None:
    mine.longer = lambda prompt, response, *, than: len(response) > than  # type: ignore[attr-defined]
    reward = resolve_reward("my_rewards:longer", {"than": 3})
    assert reward.score(rollout(["ab", "abcd"], [0, 0], (SORT,))).rewards.tolist() == [0.0, 1.0]


def test_a_reward_that_raises_is_an_error_that_names_function_sample_and_cause(mine: ModuleType) -> None:
    mine.parse = lambda prompt, response: int(response)  # type: ignore[attr-defined]
    reward = resolve_reward("my_rewards:parse", {})
    with pytest.raises(RewardError, match=r"'my_rewards:parse' raised ValueError: .*prompt 35018 \('35018>'\).*'1x'"):
        reward(SORT, "1x")


def test_samples_without_a_reward_of_their_own_are_counted_by_kind_and_the_first_is_named(mine: ModuleType) -> None:
    mine.parse = lambda prompt, response: float(response)  # type: ignore[attr-defined]
    reward = evolve(resolve_reward("my_rewards:parse", {}), failed_value=-0.5)
    scores = reward.score(rollout(["2", "nan", "1x", "3", "y"], [0] * 5, (SORT,)))
    assert scores.rewards.tolist() == [2.0, -0.5, -0.5, 3.0, -0.5]
    assert scores.failures == {"no-number": 1, "raised": 2}
    assert scores.first == (
        "reward 'my_rewards:parse' returned nan, wanted a finite number, on prompt 35018 ('35018>') with the response "
        "'nan'"
    )


def test_a_reward_that_fails_on_every_sample_is_an_error_that_names_the_first() -> None:
    def broken(prompt: Prompt, response: str) -> float:
        raise ValueError("no\nway")

    with pytest.raises(
        RewardError,
        match=r"^reward 'mine' raised ValueError: no way \(tests/rollout/test_rewards.py:\d+\) on .* 'a'; all 2 samp",
    ):
        Reward(name="mine", function=broken).score(rollout(["a", "b"], [0, 0], (SORT,)))


def in_a_library(prompt: Prompt, response: str) -> float:
    return float(json.loads(response))


def in_corerl(prompt: Prompt, response: str) -> float:
    return exact_match(prompt, response)


@pytest.mark.parametrize("function", [in_a_library, in_corerl])
def test_where_a_reward_fails_is_told_as_the_innermost_line_of_the_users_own(function: Callable[..., Any]) -> None:
    failure = Reward(name="mine", function=function).outcome(Prompt(index=0, text="a", answer=""), "[")
    line = function.__code__.co_firstlineno + 1
    assert isinstance(failure, Failure) and f" (tests/rollout/test_rewards.py:{line}) on prompt 0 " in failure.message


def test_where_a_reward_of_corerls_own_fails_is_told_as_its_innermost_line() -> None:
    failure = resolve_reward("exact-match", {}).outcome(Prompt(index=0, text="a", answer=""), "x")
    assert isinstance(failure, Failure) and re.search(r"corerl/rollout/rewards\.py:\d+\) on prompt 0", failure.message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", [1.0]])
def test_a_reward_that_is_no_finite_number_is_an_error_that_shows_it(mine: ModuleType, value: object) -> None:
    mine.odd = lambda prompt, response: value  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match="returned .*, wanted a finite number, on prompt 35018"):
        resolve_reward("my_rewards:odd", {})(SORT, "1")


def test_a_built_in_reward_refuses_a_prompt_without_an_answer() -> None:
    with pytest.raises(RewardError, match="has no answer to compare with"):
        resolve_reward("position-match", {})(Prompt(index=0, text="hello", answer=""), "x")


def test_unknown_names_imports_that_fail_and_options_that_do_not_fit_are_config_errors(mine: ModuleType) -> None:
    mine.number = 3  # type: ignore[attr-defined]
    for name, options, text in [
        ("exact-mach", {}, "did you mean 'exact-match'"),
        ("no_such_module:f", {}, "ModuleNotFoundError"),
        ("my_rewards:absent", {}, "has no function 'absent'"),
        ("my_rewards:number", {}, "has no function 'number'"),
        ("exact-match", {"strict": True}, "'strict'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            resolve_reward(name, options)


def swapped(response: str, prompt: Prompt) -> float:
    return 1.0


def by_name(*, prompt: Prompt, response: str) -> float:
    return 1.0


def one(prompt: Prompt) -> float:
    return 1.0


async def promised(prompt: Prompt, response: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (swapped, r"takes \(response: .* swap its first two parameters"),
        (by_name, "make its first two parameters positional"),
        (one, "make its first two parameters positional"),
        (promised, "is an async function, wanted a plain one"),
    ],
)
def test_a_reward_that_cannot_be_called_with_prompt_and_response_is_refused(
    mine: ModuleType, function: object, text: str
) -> None:
    mine.reward = function  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=text):
        resolve_reward("my_rewards:reward", {})


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def unspeakable(prompt: Prompt, response: str) -> float:
    raise Unspeakable


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        (lambda prompt, response: 10**400, "no-number", "wanted a finite number"),
        (lambda prompt, response: 1e300, "no-number", "returned 1e+300, wanted a finite number"),
        (unspeakable, "raised", "raised Unspeakable (tests/rollout/test_rewards.py:"),
    ],
)
def test_what_float32_cannot_hold_and_errors_without_words_are_failures(
    function: Callable[..., Any], kind: str, told: str
) -> None:
    outcome = Reward(name="mine:f", function=function).outcome(Prompt(index=3, text="a", answer="b"), "c")
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind and told in outcome.message


@pytest.mark.parametrize("options", [{}, {"hidden": True}])
def test_a_reward_that_needs_the_main_thread_is_told_where_it_will_run_in_another(options: dict[str, Any]) -> None:
    reward = resolve_reward("tests.rollout.user_rewards:alarmed", options)
    assert reward(SORT, "x") == 1.0  # here, in the main thread
    with pytest.raises(ConfigError) as caught:
        require_any_thread(reward, SORT, setting="rollout.source='one-step-off'")
    assert caught.value.message.startswith(
        "reward.processes: 0 scores in a thread of the driver with rollout.source='one-step-off', but reward "
        "'tests.rollout.user_rewards:alarmed' needs the main thread (ValueError: signal only works in main thread of "
        "the main interpreter (tests/rollout/user_rewards.py:"
    )
    assert caught.value.message.endswith("); set reward.processes to at least 1, or rollout.source='synchronous'")


def test_a_reward_that_fails_on_one_sample_is_not_refused_for_it() -> None:
    for name in ("picky", "act"):
        require_any_thread(resolve_reward(f"tests.rollout.user_rewards:{name}", {}), SORT, setting="")


def test_a_reward_that_leaves_fails_on_its_sample_and_does_not_end_the_run() -> None:
    reward = resolve_reward("tests.rollout.user_rewards:act", {})
    outcome = reward.outcome(SORT, "leave")
    assert isinstance(outcome, Failure) and outcome.kind == "died"
    assert " ended its process (sys.exit(4)) on prompt " in outcome.message
