"""An engine whose cache of keys and values is bounded, without a model: it counts its steps and what it retracts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from attrs import define, field

from corerl.engines import CacheUse

READ = 256  # tokens that are read in the time of a step


@define(kw_only=True, eq=False)
class Row:
    episode: Hashable
    tokens: int  # so far
    left: int  # to sample
    answer: asyncio.Future[None]


@define(eq=False)
class BoundedEngine:
    """In each step every running row gets a token. Rows begin in the order in which they come, as soon as there is room
    for their tokens. When the cache is full, the newest rows are retracted: they wait again. What the cache has of an
    episode between its turns goes when there is need of room, the oldest first, and is then read again."""

    capacity: int  # tokens
    steps: float = field(default=0.0, init=False)
    retracted: int = field(default=0, init=False)
    _running: list[Row] = field(factory=list, init=False)
    _waiting: deque[Row] = field(factory=deque, init=False)
    _kept: dict[Hashable, int] = field(factory=dict, init=False)  # tokens of episodes between two turns

    async def sample(self, episode: Hashable, *, context: int, tokens: int) -> None:
        """Sample so many `tokens` after a `context`."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Row(episode=episode, tokens=context, left=tokens, answer=answer))
        await answer

    async def cache_use(self) -> dict[str, CacheUse]:
        tokens = self._used + sum(row.tokens for row in self._waiting)
        return {"engine-0": CacheUse(capacity=self.capacity, tokens=tokens, retracted=self.retracted)}

    @property
    def _used(self) -> int:
        return sum(row.tokens for row in self._running)

    def step(self) -> None:
        while self._waiting and self._used + self._waiting[0].tokens < self.capacity:
            row = self._waiting.popleft()
            self.steps += (row.tokens - self._kept.pop(row.episode, 0)) / READ
            self._running.append(row)
        while self._used + len(self._running) > self.capacity:
            self._waiting.appendleft(self._running.pop())
            self.retracted += 1
        self.steps += bool(self._running)
        for row in self._running:
            row.tokens += 1
            row.left -= 1
            if not row.left:
                self._kept[row.episode] = row.tokens
                row.answer.set_result(None)
        self._running = [row for row in self._running if row.left]
        while self._kept and self._used + sum(self._kept.values()) > self.capacity:
            del self._kept[next(iter(self._kept))]
