import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.config.schema import RewardConfig, RewardFunction
from corerl.data.prompts import Prompt
from corerl.errors import ConfigError, RewardError
from corerl.event_loop import in_thread
from corerl.rollout.rewards.base import (
    Failure,
    Judged,
    OutcomeScorer,
    Reward,
    Scores,
    Scoring,
    Term,
    WeightedSum,
    samples_of,
)
from corerl.rollout.rewards.lookup import exact_match, resolve_reward, reward_of
from corerl.rollout.sampler import Rollout
from corerl.types import SampleBatch

SORT = Prompt(index=35018, text="35018>", answer="01358")


def rollout(texts: list[str], groups: list[int], prompts: tuple[Prompt, ...]) -> Rollout:
    batch = SampleBatch(
        tokens=np.zeros(len(texts), dtype=np.int64),
        offsets=np.arange(len(texts) + 1),
        rows={"group": np.array(groups)},
    )
    return Rollout(batch=batch, prompts=prompts, texts=texts)


def test_failed_samples_are_counted_and_the_first_is_named(mine: ModuleType) -> None:
    mine.parse = lambda prompt, response: float(response)  # type: ignore[attr-defined]
    reward = evolve(resolve_reward("my_rewards:parse", {}), failed_value=-0.5)
    scores = reward.score(rollout(["2", "nan", "1x", "3", "y"], [0] * 5, (SORT,)))
    assert scores.rewards.tolist() == [2.0, -0.5, -0.5, 3.0, -0.5]
    assert scores.failures == {"no-number": 1, "raised": 2}
    assert scores.first == (
        "reward 'my_rewards:parse' returned nan, wanted a finite number, on prompt 35018 ('35018>') with the response "
        "'nan'"
    )


def in_a_library(prompt: Prompt, response: str) -> float:
    return float(json.loads(response))


def in_corerl(prompt: Prompt, response: str) -> float:
    return exact_match(prompt, response)


@pytest.mark.parametrize("function", [in_a_library, in_corerl])
def test_a_failure_names_the_users_innermost_line(function: Callable[..., Any]) -> None:
    failure = Reward(name="mine", function=function).outcome((Prompt(index=0, text="a", answer=""), "[", ()))
    line = function.__code__.co_firstlineno + 1
    where = f" (tests/rollout/rewards/test_base.py:{line}) on prompt 0 "
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
        (unspeakable, "raised Unspeakable (tests/rollout/rewards/test_base.py:"),
        (cancelled, "raised CancelledError: by a client of mine (tests/rollout/rewards/test_base.py:"),
        (verbose, f"raised ValueError: no number in {984 * 'x'}... (tests/rollout/rewards/test_base.py:"),
    ],
)
def test_errors_without_words_or_with_too_many_are_failures(function: Callable[..., Any], told: str) -> None:
    outcome = Reward(name="mine:f", function=function).outcome((SORT, "c", ()))
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
    found = Reward(name="mine:f", function=lambda prompt, response: value)(SORT, "x")
    assert found == number and type(found) is float


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
    outcome = reward.outcome((SORT, "x", ()))
    assert isinstance(outcome, Failure) and outcome.kind == "no-number"
    assert outcome.message.startswith("reward 'mine:f' returned ") and len(outcome.message) < 2000


def parts(prompt: Prompt, response: str) -> dict[str, object]:
    return {"right": np.float32(response == "x"), "short": torch.tensor(1.0 / len(response))}


@pytest.mark.parametrize(
    ("weights", "rewards"),
    [({}, [2.0, 0.5]), ({"right": 3.0, "short": -1.0}, [2.0, -0.5]), ({"right": 1, "short": 0}, [1, 0])],
)
def test_parts_are_weighted_in_the_reward_only(weights: dict[str, float], rewards: list[float]) -> None:
    scores = Reward(name="mine:f", function=parts, weights=weights).score(rollout(["x", "yy"], [0, 0], (SORT,)))
    assert scores.rewards.tolist() == rewards
    assert scores.parts == {"right": (1.0, 2), "short": (1.5, 2)}


def test_parts_that_are_none_do_not_count() -> None:
    def of_task(prompt: Prompt, response: str) -> dict[str, float | None]:
        right = None if response == "y" else float(response == "x")
        return {"right": right, "short": None if response == "z" else 0.5}

    for weights, rewards in [({}, [1.5, 0.5, 0.0]), ({"right": 3.0, "short": -1.0}, [2.5, -0.5, 0.0])]:
        reward = Reward(name="mine:f", function=of_task, weights=weights)
        scores = reward.score(rollout(["x", "y", "z"], [0, 0, 0], (SORT,)))
        assert scores.rewards.tolist() == rewards and not scores.failed.any()
        assert scores.parts == {"right": (1.0, 2), "short": (1.0, 2)}
    for value in (None, {"right": None}, {}):
        outcome = Reward(name="mine:f", function=lambda prompt, response, value=value: value).outcome((SORT, "x", ()))
        assert isinstance(outcome, Failure) and f"returned {value}, wanted" in outcome.message


def test_a_function_may_take_the_responses_tokens(mine: ModuleType) -> None:
    seen: list[list[int]] = []
    mine.reward = lambda prompt, response, tokens: seen.append(tokens) or 0.0  # type: ignore[attr-defined]
    batch = SampleBatch(
        tokens=np.arange(12),
        offsets=np.array([0, 4, 10, 12]),
        # A response; an episode of two answers; an episode that asked nothing.
        columns={"loss_mask": np.array([0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0], dtype=bool)},
        rows={"group": np.zeros(3, dtype=np.int64)},
    )
    resolve_reward("my_rewards:reward", {}).score(Rollout(batch=batch, prompts=(SORT,), texts=["a", "b", ""]))
    assert seen == [[2, 3], [7, 8], []]
    assert {type(token) for tokens in seen for token in tokens} == {int}
    with pytest.raises(ConfigError, match="reward.options.tokens: .* gets the response's token ids under this name"):
        resolve_reward("my_rewards:reward", {"tokens": 3})


@pytest.mark.parametrize("others", [("exact-match",), ("exact-match", "my_rewards:counting")])
def test_tokens_are_sent_only_to_functions_that_take_them(mine: ModuleType, others: tuple[str, ...]) -> None:
    mine.counting = counting  # type: ignore[attr-defined]
    reward = reward_of(RewardConfig(functions=tuple(RewardFunction(name=name) for name in others)))
    assert reward.takes_tokens == (len(others) == 2)
    both = rollout(["1", "2"], [0, 0], (SORT,))
    assert samples_of(both, tokens=False) == [(SORT, "1", ()), (SORT, "2", ())]
    for (prompt, text, tokens), wanted in zip(samples_of(both, tokens=True), "12", strict=True):
        assert (prompt, text, list(tokens)) == (SORT, wanted, [0])
        assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32
    assert reward.score(both).rewards.tolist() == [len(others) - 1.0] * 2


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
    scores = Reward(name="mine:f", function=judge).score(rollout(texts, [0] * 70, (SORT,)))
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
    fine, *failures = [begun.result() for begun in [reward.start(sample, limit=0.2) for sample in samples]]
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
    scores = reward_of(config).score(rollout(["01358", "x"], [0, 0], (SORT,)))
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
    scores = reward_of(RewardConfig(functions=functions)).score(rollout(["34", "5", "text"], [0, 0, 0], (SORT,)))
    assert scores.rewards.tolist() == [2.0, 1.0, 40.0]
    assert scores.parts == {"of_sums": (6.0, 2), "of_texts": (4.0, 1), "of_texts.long": (4.0, 1)}

    mine.of_texts = lambda prompt, response: None  # type: ignore[attr-defined]
    scores = reward_of(RewardConfig(functions=functions, failed_value=-1.0)).score(
        rollout(["34", "text"], [0, 0], (SORT,))
    )
    assert scores.rewards.tolist() == [2.0, -1.0] and scores.failures == {"no-number": 1}
    assert scores.first.startswith(
        "reward 'of_sums + of_texts' returned [None, None], wanted a finite number, on prompt"
    )


def test_with_an_async_function_others_run_in_the_callers_thread(
    mine: ModuleType,
) -> None:
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
    fine, slow, bad, again = [each.result() for each in begun]
    assert fine == again == Judged(reward=1.0, parts={"later": 0.0, "sync": 1.0})
    assert isinstance(slow, Failure) and slow.kind == "timeout" and "reward.timeout=0.25 seconds" in slow.message
    assert isinstance(bad, Failure) and bad.kind == "raised" and "KeyError: 'bad'" in bad.message


# ---- beside other coroutines -----------------------------------------------------------------------------------------


class Counts:
    """A scorer that must not be called by two threads at once."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.scoring, self.go = threading.Event(), threading.Event()
        self.busy = threading.Lock()

    def score(self, given: Rollout, *, part: bool = False) -> Scores:
        assert self.busy.acquire(blocking=False)
        self.order += given.texts
        self.scoring.set()
        assert self.go.wait(60)
        self.busy.release()
        if given.texts == ["broken"]:
            raise RewardError("no score")
        return Scores(rewards=np.array([len(given.texts[0]) + part], np.float32))


def of(text: str) -> Rollout:
    return rollout([text], [0], (SORT,))


async def aside(call: Callable[[], Scores]) -> Scores:
    return await in_thread(call, name="scoring")


def test_rollouts_are_scored_in_turn_while_coroutines_run() -> None:
    scorer = Counts()

    async def work() -> list[Any]:
        scoring = Scoring(scorer, aside)
        calls = [scoring.score(of("a")), scoring.score(of("broken")), scoring.score(of("abc"), part=True)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while not scorer.scoring.is_set():
            await asyncio.sleep(0)
        scorer.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, broken, last = asyncio.run(work())
    assert scorer.order == ["a", "broken", "abc"]
    assert (first.rewards.tolist(), last.rewards.tolist()) == ([1.0], [4.0])
    assert isinstance(broken, RewardError)


def test_cancelled_scoring_still_keeps_its_turn() -> None:
    scorer = Counts()

    async def work() -> list[float]:
        scoring = Scoring(scorer, aside)
        given_up, in_vain = (asyncio.ensure_future(scoring.score(of(text))) for text in ("broken", "never"))
        while not scorer.scoring.is_set():
            await asyncio.sleep(0)
        given_up.cancel()
        in_vain.cancel()
        last = asyncio.ensure_future(scoring.score(of("ab")))
        for _ in range(9):
            await asyncio.sleep(0)
        assert given_up.cancelled() and in_vain.cancelled() and scorer.order == ["broken"]
        scorer.go.set()
        return (await last).rewards.tolist()

    assert asyncio.run(work()) == [2.0]
    assert scorer.order == ["broken", "ab"]


# ---- rewards that samples bring --------------------------------------------------------------------------------------

LATE = Failure(kind="timeout", message="it was late")


def brought(outcomes: Sequence[Any], **rows: list[int]) -> Rollout:
    count = len(outcomes)
    batch = SampleBatch(
        tokens=np.zeros(count, np.int64),
        offsets=np.arange(count + 1),
        rows={"group": np.zeros(count, np.int64), **{name: np.array(each) for name, each in rows.items()}},
    )
    texts = ["x" * (1 + row) for row in range(count)]
    return Rollout(batch=batch, prompts=(Prompt(index=3, text="?", answer=""),), texts=texts, outcomes=list(outcomes))


def by_length(failed: float = -1.0) -> OutcomeScorer:
    return OutcomeScorer(Reward(name="long", function=lambda prompt, text: len(text)), failed_value=failed)


def test_only_samples_that_bring_no_reward_are_scored() -> None:
    scores = by_length().score(brought([0.5, None, LATE, Judged(reward=2.0, parts={"right": 1.5, "short": 0.5})]))
    assert scores.rewards.tolist() == [0.5, 2.0, -1.0, 2.0]
    assert scores.failed.tolist() == [False, False, True, False]
    assert (scores.failures, scores.first) == ({"timeout": 1}, "it was late")
    assert scores.parts == {"right": (1.5, 1), "short": (0.5, 1)}


def test_a_reward_that_fails_beside_brought_ones_counts_too() -> None:
    def raises(prompt: Prompt, response: str) -> float:
        raise ValueError("no")

    scores = OutcomeScorer(Reward(name="r", function=raises), failed_value=-1.0).score(brought([1.5, None, LATE]))
    assert scores.failed.tolist() == [False, True, True]
    assert scores.failures == {"raised": 1, "timeout": 1}
    assert scores.first.startswith("reward 'r' raised ValueError: no")


def test_rows_of_an_episode_share_its_reward() -> None:
    episode, final = [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]
    scores = by_length().score(brought([None] * 3 + [7.0] * 2, episode=episode, final=final))
    assert scores.rewards.tolist() == [2.0, 2.0, 2.0, 7.0, 7.0]  # the text of row 1 has two characters


def test_a_batch_of_failures_is_an_error() -> None:
    rollout = brought([LATE, LATE])
    with pytest.raises(RewardError, match="^it was late; none of the 2 samples has a reward$"):
        by_length().score(rollout)
    assert by_length(0.25).score(rollout, part=True).rewards.tolist() == [0.25, 0.25]
