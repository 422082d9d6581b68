"""Send the rows that wait for one engine together, in as many calls at once as it answers."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from attrs import frozen

from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.continuation import split

T = TypeVar("T")

OnRowsEnded = Callable[[int], None]  # called with how many rows of a request have ended
Call = Callable[[GenerateRequest, OnRowsEnded | None], Awaitable[Generation | None]]  # None: the engine has died


@frozen(kw_only=True, eq=False)
class _Waiting:
    number: int
    request: GenerateRequest
    on_ended: OnRowsEnded | None
    answer: asyncio.Future[Generation | None]


class Batcher:
    """The requests of one engine. For coroutines of one event loop."""

    def __init__(self, call: Call, *, calls: int, width: int, on_free_slot: Callable[[], None] = lambda: None) -> None:
        """At most `calls` at once, each of requests with the same parameters and version, of at most `width` rows
        together; one request is never divided. `on_free_slot` is called whenever a call has ended, and another could
        begin if any request waited."""
        self._call = call
        self._calls = calls
        self.width = width
        self._on_free_slot = on_free_slot
        self._waiting: list[_Waiting] = []  # lowest number first
        self._sending: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held = False

    async def generate(
        self, request: GenerateRequest, *, number: int, on_ended: OnRowsEnded | None = None
    ) -> Generation | None:
        """What the engine answers; None if it died before. Those with the lowest `number` go first; a request whose
        task is cancelled is not sent, if it has not been. `on_ended` is called only while no other shares the call."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(number=number, request=request, on_ended=on_ended, answer=loop.create_future())
        insort(self._waiting, waiting, key=lambda each: each.number)
        loop.call_soon(self._send)  # after what other tasks ask for at this moment
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._waiting = [each for each in self._waiting if each is not waiting]
            raise

    def hold(self, held: bool) -> None:
        """Send nothing while it is held."""
        self._held = held
        self._send()

    def hand_back(self, count: int | None = None) -> None:
        """Answer None to the requests that wait to be sent, or so many that would be sent next, so that they are routed
        again."""
        for waiting in self._waiting[:count]:
            if not waiting.answer.done():  # its task was cancelled
                waiting.answer.set_result(None)
        del self._waiting[:count]

    @property
    def rows_waiting(self) -> int:
        return sum(len(each.request) for each in self._waiting)

    async def idle(self) -> None:
        """Wait until no call is in progress."""
        await self._idle.wait()

    def _send(self) -> None:
        while self._waiting and not self._held and len(self._sending) < self._calls:
            taken = self._taken()
            task = asyncio.create_task(settle([each.answer for each in taken], partial(self._generate, taken)))
            self._sending.add(task)
            self._idle.clear()
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not self._sending:
            self._idle.set()
        self._send()
        if not self._waiting and not self._held:
            self._on_free_slot()

    def _taken(self) -> list[_Waiting]:
        """The first request and others that fit into the same call; fewer if other calls could begin too."""
        free = self._calls - len(self._sending)
        room = min(self.width, -(-sum(len(each.request) for each in self._waiting) // free))
        first = self._waiting[0]
        taken: list[_Waiting] = []
        for each in self._waiting:
            fits = not taken or len(each.request) <= room
            alike = (each.request.params, each.request.version) == (first.request.params, first.request.version)
            if fits and alike:
                taken.append(each)
                room -= len(each.request)
        gone = set(taken)
        self._waiting = [each for each in self._waiting if each not in gone]
        return taken

    async def _generate(self, taken: list[_Waiting]) -> Sequence[Generation | None]:
        if len(taken) == 1:
            return [await self._call(taken[0].request, taken[0].on_ended)]
        requests = [each.request for each in taken]
        generated = await self._call(GenerateRequest.concatenate(requests), None)
        return [None] * len(taken) if generated is None else split(generated, requests)


async def settle(answers: Sequence[asyncio.Future[T]], results: Callable[[], Awaitable[Sequence[T]]]) -> None:
    """Give each future its result, or all of them the error, but for those that somebody has cancelled."""
    try:
        found = await results()
    except asyncio.CancelledError:
        for answer in answers:
            answer.cancel()
        raise
    except BaseException as error:
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
        if not isinstance(error, Exception):
            raise
        return
    for answer, result in zip(answers, found, strict=True):
        if not answer.done():
            answer.set_result(result)
