"""Batches that are each sampled when they are wanted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from corerl.algorithms.advantages import spread
from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import CheckpointError, EngineFailed, RewardError, WorkerDied
from corerl.rollout.rewards.base import Reward, Scoring
from corerl.rollout.sources.base import DynamicSampling, Scored
from corerl.rollout.sources.synchronous import Synchronous
from tests.engines.services import serve
from tests.rollout.engines import LIMIT, Engines
from tests.rollout.sources.conftest import Use
from tests.rollout.sources.drawing import REWARD, drawing


def source(engines: Engines, *, reward: Reward = REWARD, steps: int = 4, **parts: Any) -> Synchronous:
    """Rewards are called in the thread that waits."""
    return Synchronous(drawing(engines, reward=Scoring(reward, engines.fleet.loop.in_caller), **parts), steps=steps)


def same(a: Scored, b: Scored) -> bool:
    return (
        a.step == b.step
        and a.rollout.texts == b.rollout.texts
        and a.rollout.prompts == b.rollout.prompts
        and np.array_equal(a.rewards, b.rewards)
        and np.array_equal(a.rollout.batch.tokens, b.rollout.batch.tokens)
    )


def test_steps_come_in_order_scored_with_fresh_prompts_and_fresh_noise(engines: Engines) -> None:
    begun = source(engines)
    steps = engines.rest(begun)
    assert [scored.step for scored in steps] == [0, 1, 2, 3]
    assert engines.rest(begun) == []  # as often as it is asked
    assert len({prompt.index for scored in steps for prompt in scored.rollout.prompts}) == 12
    assert len(set(engines.keys)) == len(engines.keys) == 24
    for scored in steps:
        expected = [REWARD(scored.rollout.prompts[row // 2], text) for row, text in enumerate(scored.rollout.texts)]
        assert scored.rewards.tolist() == pytest.approx(expected)
        assert scored.exact_match == 0.0
        assert scored.seconds.keys() == {"rollout", "reward"}
        assert [shown.response for shown in scored.shown(2)] == [scored.rollout.texts[0], scored.rollout.texts[2]]
        every = scored.samples()
        assert [each.response for each in every] == scored.rollout.texts
        assert [each.prompt for each in every[::2]] == [prompt.text for prompt in scored.rollout.prompts]
        assert [each.reward for each in every] == scored.rewards.tolist()


def test_a_source_restored_at_a_position_continues_with_the_very_same_samples(engines: Engines) -> None:
    whole = engines.rest(source(engines))
    begun = source(engines)
    for _ in range(2):
        engines.next(begun)
    position = begun.position
    resumed = source(engines)
    resumed.restore(position)
    rest = engines.rest(resumed)
    assert [scored.step for scored in rest] == [2, 3]
    assert all(same(a, b) for a, b in zip(rest, whole[2:], strict=True))
    with pytest.raises(CheckpointError, match="seed=7"):
        source(engines, seed=8).restore(position)


def test_a_refilled_run_resumes_where_it_stood(engines: Engines) -> None:
    halves = Reward(name="halves", function=lambda prompt, response: prompt.index % 2 * len(response))

    def refilled() -> Synchronous:
        refill = DynamicSampling(useful=spread, attempts=3)
        return source(engines, reward=halves, steps=3, prompts=4, refill=refill)

    steps = engines.rest(refilled())
    assert sum(scored.counts["attempts"] for scored in steps) > 3
    first = refilled()
    engines.next(first)
    resumed = refilled()
    resumed.restore(first.position)
    assert [same(a, b) for a, b in zip(engines.rest(resumed), steps[1:], strict=True)] == [True, True]


def test_failures_of_the_reward_travel_with_the_step_and_a_broken_reward_stops_it(engines: Engines) -> None:
    calls = iter(range(12))

    def odd(prompt: Prompt, response: str) -> float:
        assert threading.current_thread() is threading.main_thread()
        if next(calls) not in (0, 2, 3, 5):  # of the first step samples 1 and 4, of the second all
            raise ValueError("odd")
        return 0.5

    begun = source(engines, reward=Reward(name="odd", function=odd, failed_value=-1.0))
    scored = engines.next(begun)
    assert scored.rewards.tolist() == [0.5, -1.0, 0.5, 0.5, -1.0, 0.5]
    assert scored.failures == {"raised": 2}
    prompt = scored.rollout.prompts[0]
    line = odd.__code__.co_firstlineno + 3
    assert scored.first_failure == (
        f"reward 'odd' raised ValueError: odd (tests/rollout/sources/test_synchronous.py:{line}) on prompt "
        f"{prompt.index} ({prompt.text!r}) with the response {scored.rollout.texts[1]!r}"
    )
    assert begun.position["rollout_step"] == 1
    with pytest.raises(RewardError, match="raised ValueError: odd .* all 6 samples failed"):
        engines.next(begun)
    assert begun.position["rollout_step"] == 1


def test_what_dying_replicas_were_asked_is_drawn_by_others_or_by_those_in_their_place_and_is_the_same(
    use: Use[Engines],
) -> None:
    undisturbed = use(Engines(2))
    wanted = undisturbed.rest(source(undisturbed))
    for deaths, log in ((1, []), (2, ["receive", "replace 0", "replace 1"])):
        engines = use(Engines(2))
        begun = source(engines)
        steps = [engines.next(begun)]
        engines.deaths = deaths
        steps += engines.rest(begun)
        assert sorted(engines.log) == log
        assert all(same(a, b) for a, b in zip(steps, wanted, strict=True))


def test_an_engines_error_and_the_last_death_that_is_allowed_are_raised_once_and_as_they_are(
    use: Use[Engines],
) -> None:
    engines = use(Engines(2))
    engines.failure = EngineFailed("engine-1 is broken")
    for _ in range(2):  # not that the engines have ended, which follows from it
        with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
            engines.next(source(engines))

    class Cutting(Engines):
        def draw(self, replica: int, request: GenerateRequest) -> Generation:
            return self.drawn(request, 1)

    cutting = use(Cutting())
    with pytest.raises(EngineFailed, match="^5 of 6 responses came back unfinished, but the engines were not paused"):
        cutting.next(source(cutting))

    dying = use(Engines(restarts=1))
    dying.deaths = 9
    with pytest.raises(WorkerDied, match="^engine-0: its process died during generate") as raised:
        dying.next(source(dying))
    assert raised.value.__notes__ == ["the engine had already been restarted 1 time (rollout.restarts)"]
    assert dying.log == ["replace 0", "receive"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_the_wait_and_what_was_waited_for(use: Use[Engines]) -> None:
    class Interrupting(Engines):
        def draw(self, replica: int, request: GenerateRequest) -> Generation:
            if len(self.keys) > 6:  # the second attempt: who waits has scored the first one
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                with self.changing:
                    assert self.changing.wait_for(lambda: bool(self._ends), LIMIT)  # until all are killed
            return self.drawn(request)

    engines = use(Interrupting())
    equal = Reward(name="equal", function=lambda prompt, response: 1.0)
    begun = source(engines, reward=equal, refill=DynamicSampling(useful=spread, attempts=9))
    with pytest.raises(KeyboardInterrupt):
        engines.next(begun)
    assert begun.position["rollout_step"] == 0

    def interrupted(prompt: Prompt, response: str) -> float:
        signal.raise_signal(signal.SIGINT)
        return 1.0

    again = use(Engines())
    with pytest.raises(KeyboardInterrupt):
        again.next(source(again, reward=Reward(name="interrupted", function=interrupted)))

    def ensure() -> None:
        raise KeyboardInterrupt

    dying = use(Engines())
    dying.deaths = 1
    with pytest.raises(KeyboardInterrupt):
        serve(dying.fleet, source(dying).next(), ensure)
