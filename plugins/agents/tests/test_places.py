"""As many episodes at once as the engines' caches have room for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest

from corerl.engines import CacheUse
from corerl_agents.places import FULL, LOOKS, Limit, Places
from plugins.agents.tests.bounded_engine import BoundedEngine

CAPACITY, PROMPT, TURNS, TOOL = 20_000, 20, 4, 10
EPISODES = 2000


async def play(engine: BoundedEngine, places: Places | asyncio.Semaphore) -> float:
    """Play all episodes, of turns of 5 to 40 tokens with a tool's between them; returns the steps that it took."""
    lengths, before = random.Random(0), engine.steps

    async def episode(number: int, turns: list[int]) -> None:
        context = PROMPT
        for tokens in turns:
            await engine.sample(number, context=context, tokens=tokens)
            context += tokens + TOOL

    async def begin() -> None:
        async with asyncio.TaskGroup() as playing:
            for number in range(EPISODES):
                await places.acquire()
                task = playing.create_task(episode(number, [lengths.randrange(5, 41) for _ in range(TURNS)]))
                task.add_done_callback(lambda _: places.release())

    beginning = asyncio.create_task(begin())
    while not beginning.done():
        for _ in range(4):  # what follows from a step is done before the next one
            await asyncio.sleep(0)
        engine.step()
    await beginning
    return engine.steps - before


def fixed(number: int) -> tuple[float, int]:
    """Steps, and retracted rows."""
    engine = BoundedEngine(CAPACITY)
    return asyncio.run(play(engine, asyncio.Semaphore(number))), engine.retracted


def automatic() -> tuple[float, float, int, float]:
    """Steps of the first and of the second time that all episodes are played, retracted rows, and the last limit."""

    async def run() -> tuple[float, float, int, float]:
        engine = BoundedEngine(CAPACITY)
        places = Places(engine.cache_use, longest=PROMPT + TURNS * (40 + TOOL), seconds=0.0)
        first, second = await play(engine, places), await play(engine, places)
        return first, second, engine.retracted, places.limit.number

    return asyncio.run(run())


def test_auto_is_as_fast_as_the_best_number_and_retracts_nothing() -> None:
    steps = {number: fixed(number)[0] for number in (160, 180, 200, 220, 240)}
    best = min(steps, key=steps.__getitem__)
    assert best not in (160, 240)
    first, second, retracted, number = automatic()
    assert retracted == 0
    assert 0.8 * best < number < 1.1 * best
    assert second < 1.06 * steps[best]
    assert first < 1.12 * steps[best]  # from what fits if each episode is as long as it may become


def test_far_too_many_episodes_retract_each_other() -> None:
    few, none = fixed(180)
    many, retracted = fixed(400)
    assert none == 0 and retracted > EPISODES
    assert many > 2 * few


def cache(tokens: int, *, retracted: int = 0, name: str = "engine-0") -> Mapping[str, CacheUse]:
    return {name: CacheUse(capacity=1000, tokens=tokens, retracted=retracted)}


def round_of(limit: Limit, *, tokens: int, waiting: bool = True) -> float:
    """The limit after a round in which the cache had so many tokens at its fullest."""
    for seen in (tokens // 2, tokens, *[0] * (LOOKS - 2)):
        limit.look(cache(seen), waiting=waiting)
    for _ in range(int(limit.number) + 1):
        limit.ended()
    return limit.number


def test_it_begins_with_what_surely_fits() -> None:
    limit = Limit(longest=100)
    limit.look({**cache(0), **cache(0, name="engine-1")}, waiting=True)
    assert limit.number == pytest.approx(2 * 1000 * FULL / 100)
    small = Limit(longest=10_000)
    small.look(cache(0), waiting=True)
    assert small.number == 1.0


def test_a_round_leads_to_a_full_cache_at_most_doubling() -> None:
    limit = Limit(longest=100)
    limit.look(cache(0), waiting=True)
    assert round_of(limit, tokens=200) == pytest.approx(17.0)
    assert round_of(limit, tokens=680) == pytest.approx(17.0 * 0.85 / 0.68)
    assert round_of(limit, tokens=1700) == pytest.approx(17.0 * 0.85 / 0.68 / 2)  # more than fit, with those that wait


def test_the_limit_stays_while_no_episode_waits() -> None:
    limit = Limit(longest=100)
    limit.look(cache(0), waiting=False)
    assert round_of(limit, tokens=100, waiting=False) == pytest.approx(8.5)


def test_retracted_rows_halve_the_limit_once_a_round() -> None:
    limit = Limit(longest=100)
    limit.look(cache(900, retracted=7), waiting=True)  # those of the time before
    assert limit.number == pytest.approx(8.5)
    limit.look(cache(900, retracted=8), waiting=True)
    assert limit.number == pytest.approx(4.25)
    limit.look(cache(900, retracted=9), waiting=True)  # of the same episodes
    limit.look(cache(900, retracted=0), waiting=True)  # the engine was restarted
    assert limit.number == pytest.approx(4.25)
    number = round_of(limit, tokens=850)
    assert number == pytest.approx(4.25 * FULL / 0.9)  # the fullest look of this round
    limit.look(cache(900, retracted=1), waiting=True)
    assert limit.number == pytest.approx(number / 2)


def test_engines_that_do_not_serve_keep_episodes_waiting() -> None:
    serving: dict[str, CacheUse] = {}

    async def cache_use() -> Mapping[str, CacheUse]:
        return serving

    async def run() -> None:
        places = Places(cache_use, longest=1000, seconds=0.0)
        acquiring = asyncio.create_task(places.acquire())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not acquiring.done()
        serving.update(cache(0))
        await acquiring
        places.release()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # nobody looks any more

    asyncio.run(run())


def test_what_looking_raises_reaches_who_waits() -> None:
    async def cache_use() -> Mapping[str, CacheUse]:
        raise ValueError("engine-0 has died")

    with pytest.raises(ValueError, match="engine-0 has died"):
        asyncio.run(Places(cache_use, longest=1000).acquire())
