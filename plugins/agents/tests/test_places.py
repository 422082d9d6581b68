"""As many episodes at once as the engines' caches have room for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from corerl.engines import CacheUse
from corerl_agents.places import FULL, LOOKS, Limit, Places


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
