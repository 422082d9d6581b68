"""Send the rows that wait for one engine together, in as many calls at once as it answers."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable

from attrs import frozen

from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.continuation import split

Count = Callable[[int], None]  # called with how many rows of a request have ended
Call = Callable[[GenerateRequest, Count | None], Awaitable[Generation | None]]  # None: the engine has died


@frozen(kw_only=True, eq=False)
class _Waiting:
    number: int
    request: GenerateRequest
    counted: Count | None
    answer: asyncio.Future[Generation | None]


class Batcher:
    """The requests of one engine. For coroutines of one event loop."""

    def __init__(self, call: Call, *, calls: int, width: int, idle: Callable[[], None] = lambda: None) -> None:
        """At most `calls` at once, each of requests with the same parameters and of at most `width` rows together; one
        request is never divided. `idle` is called whenever a call has ended, and another could begin if anything
        waited."""
        self._call = call
        self._calls = calls
        self.width = width
        self._on_idle = idle
        self._waiting: list[_Waiting] = []  # lowest number first
        self._sending: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held = False

    async def generate(
        self, request: GenerateRequest, *, number: int, counted: Count | None = None
    ) -> Generation | None:
        """What the engine answers; None if it died before. Those with the lowest `number` go first; a request whose
        task is cancelled is not sent, if it has not been. `counted` is called only while no other shares the call."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(number=number, request=request, counted=counted, answer=loop.create_future())
        insort(self._waiting, waiting, key=lambda each: each.number)
        loop.call_soon(self._send)  # after what other tasks ask for at this moment
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._waiting = [each for each in self._waiting if each is not waiting]
            raise

    def hold(self) -> None:
        """Send nothing until `go_on`."""
        self._held = True

    def go_on(self) -> None:
        self._held = False
        self._send()

    def abandon(self) -> None:
        """Answer None to all that wait to be sent."""
        for waiting in self._waiting:
            _answer(waiting, None)
        self._waiting = []

    @property
    def rows_waiting(self) -> int:
        return sum(len(each.request) for each in self._waiting)

    def give_up_first(self) -> None:
        """Answer None to the request that would be sent next, if there is one."""
        if self._waiting:
            _answer(self._waiting.pop(0), None)

    async def idle(self) -> None:
        """Wait until no call is in progress."""
        await self._idle.wait()

    def _send(self) -> None:
        while self._waiting and not self._held and len(self._sending) < self._calls:
            task = asyncio.ensure_future(self._ask(self._taken()))
            self._sending.add(task)
            self._idle.clear()
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not self._sending:
            self._idle.set()
        self._send()
        if not self._waiting and not self._held:
            self._on_idle()

    def _taken(self) -> list[_Waiting]:
        """The first request and others that fit beside it; fewer if other calls could begin too."""
        free = self._calls - len(self._sending)
        room = min(self.width, -(-sum(len(each.request) for each in self._waiting) // free))
        first = self._waiting[0]
        taken: list[_Waiting] = []
        for each in self._waiting:
            fits = not taken or len(each.request) <= room
            if fits and each.request.params == first.request.params:
                taken.append(each)
                room -= len(each.request)
        gone = set(map(id, taken))
        self._waiting = [each for each in self._waiting if id(each) not in gone]
        return taken

    async def _ask(self, taken: list[_Waiting]) -> None:
        requests = [each.request for each in taken]
        alone = len(taken) == 1
        try:
            drawn = await self._call(
                requests[0] if alone else GenerateRequest.concatenate(requests), taken[0].counted if alone else None
            )
        except asyncio.CancelledError:
            for each in taken:
                each.answer.cancel()
            raise
        except BaseException as error:
            for each in taken:
                if not each.answer.done():
                    each.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        parts = [None] * len(taken) if drawn is None else [drawn] if alone else split(drawn, requests)
        for each, part in zip(taken, parts, strict=True):
            _answer(each, part)


def _answer(waiting: _Waiting, drawn: Generation | None) -> None:
    if not waiting.answer.done():  # its task was cancelled
        waiting.answer.set_result(drawn)
