"""Gather the requests of episodes that are played together, so that an engine of one call at a time samples them at
once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from attrs import frozen

from corerl.engines import GenerateRequest, Generation, SamplingParams, settle, split

QUIET = 0.05  # seconds without a new request after which the waiting ones are sent
GATHER = 0.5  # maximum seconds that a request waits for others


@frozen(kw_only=True, eq=False)
class _Waiting:
    number: int
    request: GenerateRequest
    answer: asyncio.Future[Generation]

    @property
    def place(self) -> tuple[int, int, int, list[int]]:
        """By which rows are sent: an episode may have several at once."""
        request = self.request
        return self.number, int(request.response_lengths[0]), int(request.noise_keys[0]), request.tokens.tolist()


class Gathering:
    """Holds requests back until every episode that may ask does so, or none has asked for a while."""

    def __init__(self, generate: Callable[[GenerateRequest], Awaitable[Generation]]) -> None:
        self._generate = generate
        self._playing = 0  # episodes
        self._waiting: list[_Waiting] = []
        self._first = 0.0  # when the first of these came, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def joins(self) -> None:
        """One more episode may ask."""
        self._playing += 1

    def leaves(self) -> None:
        """One episode asks no more."""
        self._playing -= 1
        self._look()
        if not self._playing:  # nobody is left to hear the answers
            for task in self._sending:
                task.cancel()

    async def generate(self, request: GenerateRequest, number: int) -> Generation:
        """Complete one row. Rows are sent by `number`, not by arrival: an engine's rounding depends on their order."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(number=number, request=request, answer=loop.create_future())
        if not self._waiting:
            self._first = loop.time()
        self._waiting.append(waiting)
        self._look()
        return await waiting.answer

    def _look(self) -> None:
        self._waiting = [each for each in self._waiting if not each.answer.done()]  # others were cancelled
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting and len({each.number for each in self._waiting}) >= self._playing:
            self._send()
        elif self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(min(self._first + GATHER, loop.time() + QUIET), self._send)

    def _send(self) -> None:
        alike: dict[SamplingParams, list[_Waiting]] = {}
        for waiting in sorted(self._waiting, key=lambda each: each.place):
            if not waiting.answer.done():
                alike.setdefault(waiting.request.params, []).append(waiting)
        self._waiting = []
        for together in alike.values():
            task = asyncio.create_task(settle([each.answer for each in together], partial(self._generated, together)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _generated(self, together: list[_Waiting]) -> list[Generation]:
        requests = [each.request for each in together]
        return split(await self._generate(GenerateRequest.concatenate(requests)), requests)
