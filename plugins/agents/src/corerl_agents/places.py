"""How many episodes play at once, where that is not a fixed number: as many as the engines' caches have room for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from attrs import define, field

from corerl.engines import CacheUse
from corerl_agents.config import MOST

FULL = 0.85  # share of a cache that episodes are to fill when it is fullest
GROWTH = 2.0  # most that a round raises the limit to
BACK_OFF = 0.5  # of the limit, when a row has lost its room
LOOKS = 4  # fewest of a round
SECONDS = 0.25  # between two looks

LookedAt = Callable[[], Awaitable[Mapping[str, CacheUse]]]  # how full each engine's cache is, by the engine's name


@define(kw_only=True)
class Limit:
    """The most episodes at once, by what is seen of the engines' caches.

    It changes in rounds, as a TCP sender's window does in round trips (Jacobson 1988, "Congestion Avoidance and
    Control"). A round lasts until as many episodes have ended as were allowed at its start, so that each has been as
    long as it gets. Then the limit becomes what would have filled the fullest cache to `FULL`, but at most `GROWTH`
    times as many; more only if episodes have waited. If a row has lost its room, the limit is multiplied by `BACK_OFF`
    at once, and a round begins in which that does not happen again: the episodes that are too many have yet to end.
    """

    longest: int  # tokens of an episode's row, for the first round
    number: float = 0.0  # of episodes; 0 before the first look
    _peak: float = field(default=0.0, init=False)  # the fullest cache of the round
    _looks: int = field(default=0, init=False)
    _ended: int = field(default=0, init=False)
    _waited: bool = field(default=False, init=False)
    _backed_off: bool = field(default=False, init=False)
    _retracted: dict[str, int] = field(factory=dict, init=False)  # of each engine, at the last look

    def look(self, uses: Mapping[str, CacheUse], *, waiting: bool) -> None:
        """Count what the caches hold now; `waiting`: whether an episode waits for its place."""
        if not uses:
            return
        if not self.number:
            fit = sum(FULL * use.capacity / self.longest for use in uses.values())
            self.number = min(max(fit, 1.0), MOST)
        lost = any(use.retracted > self._retracted.get(name, use.retracted) for name, use in uses.items())
        self._retracted |= {name: use.retracted for name, use in uses.items()}
        self._peak = max(self._peak, *(use.tokens / use.capacity for use in uses.values()))
        self._looks += 1
        self._waited |= waiting
        if lost and not self._backed_off:
            self._begin_round(BACK_OFF, backed_off=True)

    def ended(self) -> None:
        """One more episode has."""
        self._ended += 1
        if self._ended >= self.number and self._looks >= LOOKS:
            fits = min(FULL / self._peak, GROWTH) if self._peak else GROWTH
            self._begin_round(fits if fits < 1 or self._waited else 1.0)

    def _begin_round(self, factor: float, *, backed_off: bool = False) -> None:
        self.number = min(max(self.number * factor, 1.0), MOST)
        self._peak, self._looks, self._ended, self._waited = 0.0, 0, 0, False
        self._backed_off = backed_off


class Places:
    """As `asyncio.Semaphore`, with places for as many episodes as `Limit` allows. For coroutines of one event loop, one
    of which acquires at a time."""

    def __init__(self, cache_use: LookedAt, *, longest: int, seconds: float = SECONDS) -> None:
        """`longest`: tokens of an episode's row, at most; `seconds` between two looks at the caches."""
        self._cache_use, self._seconds = cache_use, seconds
        self.limit = Limit(longest=longest)
        self._playing = 0
        self._waiting = False
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None  # while any episode plays or waits

    async def acquire(self) -> None:
        """Wait for a place. Raises what looking at the caches has raised."""
        self._waiting = True
        try:
            self._require_looking()
            while self._playing >= int(self.limit.number):
                self._changed.clear()
                await self._changed.wait()
                self._require_looking()
            self._playing += 1
        finally:
            self._waiting = False
            self._end_if_idle()

    def release(self) -> None:
        self._playing -= 1
        self.limit.ended()
        self._changed.set()
        self._end_if_idle()

    def _require_looking(self) -> None:
        if self._looking is not None and self._looking.done():
            self._looking.result()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="look at the engines' caches")

    async def _look(self) -> None:
        try:
            while True:
                self.limit.look(await self._cache_use(), waiting=self._waiting)
                self._changed.set()
                await asyncio.sleep(self._seconds)
        finally:
            self._changed.set()

    def _end_if_idle(self) -> None:
        if not self._playing and not self._waiting and self._looking is not None:
            self._looking.cancel()
            self._looking = None
