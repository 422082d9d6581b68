import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.config.schema import RewardConfig, RewardFunction
from corerl.data.prompts import Prompt
from corerl.errors import ConfigError
from corerl.rollout.rewards import (
    Failure,
    Judged,
    Reward,
    Term,
    WeightedSum,
    ended,
    exact_match,
    find_reward,
    position_match,
    require_part,
    reward_of,
)
from corerl.rollout.scoring import RewardScorer, samples_of
from tests.rollout.rewarding import SORT, rollout


def in_a_library(prompt: Prompt, response: str) -> float:
    return float(json.loads(response))


def in_corerl(prompt: Prompt, response: str) -> float:
    return exact_match(prompt, response)


@pytest.mark.parametrize("function", [in_a_library, in_corerl])
def test_a_failure_names_the_users_innermost_line(function: Callable[..., Any]) -> None:
    failure = Reward(name="mine", function=function).outcomes([(Prompt(index=0, text="a", answer=""), "[", ())])[0]
    line = function.__code__.co_firstlineno + 1
    where = f" (tests/rollout/test_rewards.py:{line}) on prompt 0 "
    assert isinstance(failure, Failure) and where in failure.message


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def unspeakable(prompt: Prompt, response: str) -> float:
    raise Unspeakable


def cancelled(prompt: Prompt, response: str) -> float:
    raise asyncio.CancelledError("by a client of mine")


def verbose(prompt: Prompt, response: str) -> float:
    raise ValueError("no number in " + "x" * 10**6)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (unspeakable, "raised Unspeakable (tests/rollout/test_rewards.py:"),
        (cancelled, "raised CancelledError: by a client of mine (tests/rollout/test_rewards.py:"),
        (verbose, f"raised ValueError: no number in {984 * 'x'}... (tests/rollout/test_rewards.py:"),
    ],
)
def test_errors_without_words_or_with_too_many_are_failures(function: Callable[..., Any], told: str) -> None:
    outcome = Reward(name="mine:f", function=function).outcomes([(SORT, "c", ())])[0]
    assert isinstance(outcome, Failure)
    assert outcome.kind == "raised" and told in outcome.message


def interrupted(prompt: Prompt, response: str) -> float:
    raise KeyboardInterrupt


async def interrupted_later(prompt: Prompt, response: str) -> float:
    return 0.0


def test_ctrl_c_is_no_failure_of_the_sample() -> None:
    reward = Reward(name="mine:f", function=interrupted)
    terms = [Term(label="a", weight=1.0, reward=evolve(reward, function=interrupted_later))]
    several = WeightedSum(name="a + mine:f", terms=[Term(label="b", weight=1.0, reward=reward), *terms])
    for each in (reward, several):
        with pytest.raises(KeyboardInterrupt):
            each.outcomes([(SORT, "x", ())])


# ---- what a function may return, and take ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(0.5).bfloat16(), 0.5),
        (Fraction(1, 2), 0.5),
        (True, 1.0),
        (torch.tensor(True), 1.0),
        (np.uint64(7), 7.0),
    ],
)
def test_whatever_is_a_scalar_is_a_number(value: object, number: float) -> None:
    (found,) = Reward(name="mine:f", function=lambda prompt, response: value).outcomes([(SORT, "x", ())])
    assert found == Judged(reward=number) and type(found.reward) is float


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        *((lambda value=value: value, {}) for value in (math.nan, None, "1.0", [1.0], 10**400, 1e300, {})),
        *((lambda value=value: value, {}) for value in (np.array([0.5]), np.array("0.5"), np.float32("inf"))),
        *((lambda value=value: value, {}) for value in (torch.tensor([0.5]), torch.tensor(math.nan), torch.tensor(1j))),
        (lambda: (0.5, {"right": 1.0}), {}),
        (lambda: {"right": 1.0, "short": math.nan}, {}),
        (lambda: {"right": {"first": 1.0}}, {}),
        (lambda: {"far": 3e38, "farther": 3e38}, {}),
        (lambda: {1: 1.0, "1": 2.0}, {}),
        (lambda: 0.5, {"a": 2.0}),  # with weights of parts
        (lambda: {"right": 1.0}, {"rihgt": 1.0}),
        (lambda: 10**5000, {}),  # which cannot be shown
        (lambda: torch.zeros((), device="meta"), {}),
    ],
)
def test_what_is_no_finite_number_is_a_failure(value: Callable[[], object], weights: dict[str, float]) -> None:
    reward = Reward(name="mine:f", function=lambda prompt, response: value(), weights=weights)
    outcome = reward.outcomes([(SORT, "x", ())])[0]
    assert isinstance(outcome, Failure) and outcome.kind == "no-number"
    assert outcome.message.startswith("reward 'mine:f' returned ") and len(outcome.message) < 2000


def parts(prompt: Prompt, response: str) -> dict[str, object]:
    return {"right": np.float32(response == "x"), "short": torch.tensor(1.0 / len(response))}


@pytest.mark.parametrize(
    ("weights", "rewards"),
    [({}, [2.0, 0.5]), ({"right": 3.0, "short": -1.0}, [2.0, -0.5]), ({"right": 1, "short": 0}, [1, 0])],
)
def test_parts_are_weighted_in_the_reward_only(weights: dict[str, float], rewards: list[float]) -> None:
    scores = RewardScorer(Reward(name="mine:f", function=parts, weights=weights)).score(rollout(["x", "yy"]))
    assert scores.rewards.tolist() == rewards
    assert scores.parts == {"right": (1.0, 2), "short": (1.5, 2)}


@pytest.mark.parametrize("others", [("exact-match",), ("exact-match", "my_rewards:counting")])
def test_tokens_are_sent_only_to_functions_that_take_them(mine: ModuleType, others: tuple[str, ...]) -> None:
    mine.counting = counting  # type: ignore[attr-defined]
    reward = reward_of(RewardConfig(functions=tuple(RewardFunction(name=name) for name in others)))
    assert reward.takes_tokens == (len(others) == 2)
    both = rollout(["1", "2"])
    assert samples_of(both, tokens=False) == [(SORT, "1", ()), (SORT, "2", ())]
    for (prompt, text, tokens), wanted in zip(samples_of(both, tokens=True), "12", strict=True):
        assert (prompt, text, list(tokens)) == (SORT, wanted, [0])
        assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32
    assert RewardScorer(reward).score(both).rewards.tolist() == [len(others) - 1.0] * 2


# ---- async functions -------------------------------------------------------------------------------------------------


def test_an_async_function_is_awaited_for_32_samples_at_once() -> None:
    inside, most = 0, 0

    async def judge(prompt: Prompt, response: str) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.05)
        inside -= 1
        return float(response)

    texts = [str(n) for n in range(70)]
    scores = RewardScorer(Reward(name="mine:f", function=judge)).score(rollout(texts))
    assert scores.rewards.tolist() == [float(n) for n in range(70)]
    assert most == 32


def test_each_sample_of_an_async_function_fails_by_itself() -> None:
    async def judge(prompt: Prompt, response: str) -> float:
        match response:
            case "slow":
                await asyncio.sleep(60)
            case "late":
                raise TimeoutError("the judge did not answer")
            case "over":
                raise asyncio.CancelledError
            case "ends":
                raise SystemExit(3)
            case "cancels":
                cast(asyncio.Task[float], asyncio.current_task()).cancel()
        return 1.0

    samples = [(SORT, text, ()) for text in ("fine", "slow", "late", "over", "ends", "cancels")]
    reward = Reward(name="mine:f", function=judge)
    fine, *failures = [ended(begun) for begun in [reward.start(sample, limit=0.2) for sample in samples]]
    assert fine == Judged(reward=1.0)
    told = [(each.kind, each.message) for each in failures if isinstance(each, Failure)]
    assert [kind for kind, _ in told] == ["timeout", "raised", "raised", "died", "raised"]
    assert "took longer than reward.timeout=0.2 seconds" in told[0][1]
    assert "raised TimeoutError: the judge did not answer" in told[1][1]


# ---- several functions -----------------------------------------------------------------------------------------------


async def patient(prompt: Prompt, response: str, *, factor: float) -> dict[str, float]:
    return {"length": factor * len(response), "one": 1.0}


def counting(prompt: Prompt, response: str, tokens: list[int]) -> int:
    return len(tokens)


def test_several_functions_are_summed_by_weight_and_each_is_reported(mine: ModuleType) -> None:
    mine.patient, mine.counting = patient, counting  # type: ignore[attr-defined]
    config = RewardConfig(
        failed_value=-1.0,
        functions=(
            RewardFunction(name="exact-match", weight=2.0),
            RewardFunction(name="my_rewards:counting", label="tokens", weight=0.1),
            RewardFunction(
                name="my_rewards:patient", options={"factor": 3.0}, weight=10.0, weights={"length": 1.0, "one": 0.5}
            ),
        ),
    )
    scores = RewardScorer(reward_of(config)).score(rollout(["01358", "x"]))
    assert scores.rewards.tolist() == pytest.approx([2 * 1 + 0.1 * 1 + 10 * (15 + 0.5), 0 + 0.1 * 1 + 10 * (3 + 0.5)])
    assert scores.parts == {
        "exact-match": (1.0, 2),
        "tokens": (2.0, 2),
        "patient": (19.0, 2),
        "patient.length": (18.0, 2),
        "patient.one": (2.0, 2),
    }


def test_functions_that_return_none_say_nothing_of_a_sample(mine: ModuleType) -> None:
    async def of_sums(prompt: Prompt, response: str) -> float | None:
        return None if response.startswith("t") else 2.0 * len(response)

    def of_texts(prompt: Prompt, response: str) -> dict[str, float | None]:
        return {"long": float(len(response)) if response.startswith("t") else None, "both": None}

    mine.of_sums, mine.of_texts = of_sums, of_texts  # type: ignore[attr-defined]
    functions = (
        RewardFunction(name="my_rewards:of_sums", weight=0.5),
        RewardFunction(name="my_rewards:of_texts", weight=10.0),
    )
    scores = RewardScorer(reward_of(RewardConfig(functions=functions))).score(rollout(["34", "5", "text"]))
    assert scores.rewards.tolist() == [2.0, 1.0, 40.0]
    assert scores.parts == {"of_sums": (6.0, 2), "of_texts": (4.0, 1), "of_texts.long": (4.0, 1)}

    mine.of_texts = lambda prompt, response: None  # type: ignore[attr-defined]
    scores = RewardScorer(reward_of(RewardConfig(functions=functions, failed_value=-1.0))).score(
        rollout(["34", "text"])
    )
    assert scores.rewards.tolist() == [2.0, -1.0] and scores.failures == {"no-number": 1}
    assert scores.first.startswith(
        "reward 'of_sums + of_texts' returned [None, None], wanted a finite number, on prompt"
    )


def test_with_an_async_function_others_run_in_the_callers_thread(mine: ModuleType) -> None:
    def sync(prompt: Prompt, response: str) -> float:
        time.sleep(0.3 if response == "slow" else 0.0)
        if response == "bad":
            raise KeyError("bad")
        return float(threading.current_thread() is threading.main_thread())

    async def later(prompt: Prompt, response: str) -> float:
        await asyncio.sleep(0.05)
        return float(threading.current_thread() is threading.main_thread())

    mine.sync, mine.later = sync, later  # type: ignore[attr-defined]
    names = ("my_rewards:later", "my_rewards:sync")
    reward = reward_of(RewardConfig(functions=tuple(RewardFunction(name=name) for name in names)))
    begun = [reward.start((SORT, text, ()), limit=0.25) for text in ("x", "slow", "bad", "x")]
    fine, slow, bad, again = [ended(each) for each in begun]
    assert fine == again == Judged(reward=1.0, parts={"later": 0.0, "sync": 1.0})
    assert isinstance(slow, Failure) and slow.kind == "timeout" and "reward.timeout=0.25 seconds" in slow.message
    assert isinstance(bad, Failure) and bad.kind == "raised" and "KeyError: 'bad'" in bad.message


# ---- built-in rewards, and those that a config names ---------------------------------------------


def test_a_built_in_reward_refuses_a_prompt_without_an_answer() -> None:
    with pytest.raises(ValueError, match="has no answer to compare with"):
        position_match(Prompt(index=0, text="hello", answer=""), "x")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("exact_match", "; built in: exact-match, position-match; did you mean 'exact-match'?"),
        ("rewards.correct", "installed; did you mean 'rewards:correct'?"),
        ("rewards.py", "installed; did you mean 'rewards:FUNCTION'?"),
        ("correct", "; write your own as 'module:function', where module.py is in the working directory or installed"),
    ],
)
def test_an_unknown_name_is_answered_with_what_is_wanted(name: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_reward(name, {})
    assert caught.value.message.startswith(f"reward.name: unknown reward {name!r}; ")
    assert caught.value.message.endswith(end)


def test_what_cannot_be_called_is_a_config_error(mine: ModuleType) -> None:
    mine.number = 3  # type: ignore[attr-defined]
    for name, options, text in [
        ("my_rewards:number", {}, "has no function"),
        ("exact-match", {"strict": True}, "'strict'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            find_reward(name, options)


def by_name(*, prompt: Prompt, response: str) -> float:
    return 1.0


def one(prompt: Prompt) -> float:
    return 1.0


@pytest.mark.parametrize("function", [by_name, one])
def test_a_reward_with_a_wrong_signature_is_refused(mine: ModuleType, function: object) -> None:
    mine.reward = function  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"takes \(.*prompt.*, but is called as function\(prompt, response"):
        find_reward("my_rewards:reward", {})


def test_errors_of_several_functions_name_their_place(mine: ModuleType) -> None:
    one = RewardFunction(name="exact-match")
    for functions, name, said in (
        ([one, evolve(one, name="exact-mach")], {}, r"^reward.functions\[1\].name: unknown reward 'exact-mach'; built"),
        ([one, one], {}, "two functions are named 'exact-match'; give each a different label"),
        ([evolve(one, label="a.b"), evolve(one, label="a")], {}, "reward.functions: 'a.b' could also be a part of 'a'"),
        ([one], {"name": "exact-match"}, "reward.functions: cannot be combined with reward.name"),
    ):
        with pytest.raises(ConfigError, match=said):
            reward_of(RewardConfig(functions=tuple(functions), **name))
    mine.odd = lambda prompt, response: "x"  # type: ignore[attr-defined]
    several = reward_of(RewardConfig(functions=(one, RewardFunction(name="my_rewards:odd"))))
    (odd,) = several.outcomes([(SORT, "x", ())])
    assert isinstance(odd, Failure)
    assert odd.message.startswith("reward 'exact-match + odd' (odd) returned 'x', wanted a finite number, on prompt")


def test_a_part_that_a_reward_cannot_have_is_refused() -> None:
    free = Reward(name="mine:free", function=lambda prompt, text: {"a": 1.0})
    listed = evolve(free, weights={"right": 1.0, "length": 0.5})
    terms = [Term(label="free", weight=1.0, reward=free), Term(label="listed", weight=1.0, reward=listed)]
    several = WeightedSum(name="free + listed", terms=terms)
    for reward, name in [(free, "a"), (free, ""), (listed, "right"), (several, "free"), (several, "free.a")]:
        require_part(reward, name, setting="here")  # what a function returns is known once it is called
    for reward, name, end in [
        (listed, "rihgt", "its parts are 'right', 'length'; did you mean 'right'?"),
        (several, "right", "its parts are 'free', 'listed'"),
        (find_reward("exact-match", {}), "right", "'exact-match' has no parts"),
    ]:
        with pytest.raises(ConfigError, match=f"^here: '{name}' is no part of the reward; {re.escape(end)}$"):
            require_part(reward, name, setting="here")
