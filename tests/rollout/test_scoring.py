import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from corerl.errors import RewardError
from corerl.event_loop import in_thread
from corerl.rollout.rewards import Failure, Judged, Reward
from corerl.rollout.sampler import Rollout
from corerl.rollout.scoring import AsyncScorer, RewardScorer, Scores
from tests.rollout.rewarding import rollout

# ---- in turn -----------------------------------------------------------------------------------------


class Counts:
    """A scorer that must not be called by two threads at once."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.scoring, self.go = threading.Event(), threading.Event()
        self.busy = threading.Lock()

    def score(self, given: Rollout, *, partial: bool = False) -> Scores:
        assert self.busy.acquire(blocking=False)
        self.order += given.texts
        self.scoring.set()
        assert self.go.wait(60)
        self.busy.release()
        if given.texts == ["broken"]:
            raise RewardError("no score")
        return Scores(rewards=np.array([len(given.texts[0]) + partial], np.float32))


def of(text: str) -> Rollout:
    return rollout([text])


async def aside(call: Callable[[], Scores]) -> Scores:
    return await in_thread(call, name="scoring")


def test_rollouts_are_scored_in_turn_while_coroutines_run() -> None:
    scorer = Counts()

    async def work() -> list[Any]:
        scoring = AsyncScorer(scorer, aside)
        calls = [scoring.score(of("a")), scoring.score(of("broken")), scoring.score(of("abc"), partial=True)]
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
        scoring = AsyncScorer(scorer, aside)
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


def brought(outcomes: Sequence[Any], **rows: list[Any]) -> Rollout:
    return rollout(["x" * (1 + row) for row in range(len(outcomes))], outcomes=outcomes, **rows)


def by_length() -> RewardScorer:
    return RewardScorer(Reward(name="long", function=lambda prompt, text: len(text), failed_value=-1.0))


def test_a_samplers_reward_that_is_no_number_is_a_failure() -> None:
    scores = by_length().score(brought([np.nan, Judged(reward=np.inf), 1.0]))
    assert scores.rewards.tolist() == [-1.0, -1.0, 1.0]
    assert scores.failures == {"no-number": 2}
    assert scores.first == "the sampler gave a sample the reward nan, wanted a finite number"


def test_rows_of_an_episode_share_its_reward() -> None:
    episode, final = [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]
    scores = by_length().score(brought([None] * 3 + [7.0] * 2, episode=episode, final=final))
    assert scores.rewards.tolist() == [2.0, 2.0, 2.0, 7.0, 7.0]  # the text of row 1 has two characters


def test_a_roles_reward_is_a_part_of_its_name() -> None:
    given = brought([0.5, None, LATE, Judged(reward=2.0, parts={"right": 1.5})], role=["a", "b", "a", "b"])  # type: ignore[arg-type]
    scores = by_length().score(given)
    assert scores.rewards.tolist() == [0.5, 2.0, -1.0, 2.0]
    assert scores.parts == {"a": (0.5, 1), "b": (4.0, 2), "b/right": (1.5, 1)}
    np.testing.assert_array_equal(scores.values["b"], [np.nan, 2.0, np.nan, 2.0])
