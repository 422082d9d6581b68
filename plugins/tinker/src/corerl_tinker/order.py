"""Calls of the policy, one after the other in the one thread that drives the group: those of a model by their numbers,
in whatever order they arrive."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from corerl.errors import CorerlError, UserError
from corerl.messages import message_of
from corerl.rollout import EventLoop
from corerl_tinker.futures import Answer, Futures, Promise, failure
from corerl_tinker.requests import Refused

Call = Callable[[], Answer]  # in the group's thread; may raise Refused
T = TypeVar("T")

GAP_SECONDS = 600.0  # clients repeat a request for 300 s, then give it up, and number the next one all the same


class Order:
    """The queue of the group's thread, which is the one that waits in `EventLoop.run`."""

    def __init__(
        self, loop: EventLoop, futures: Futures, *, ended: Callable[[], bool], notify: Callable[[str], None]
    ) -> None:
        """`ended`: whether the ranks have ended, so that nothing more can be computed."""
        self._loop, self._futures, self._ended, self._notify = loop, futures, ended, notify
        self._calls: asyncio.Queue[tuple[Callable[[], Any], asyncio.Future[Any]]] = asyncio.Queue()
        self.lost = ""  # why nothing is computed any more; empty: all is well

    def begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Execute `call` after all that was begun before, unless the future is cancelled by then."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody may ask for
        self._calls.put_nowait((call, done))
        return done

    def require(self) -> None:
        """Raise Refused if nothing is computed any more."""
        if self.lost:
            raise Refused(self.lost, category="server")

    async def work(self) -> None:
        """Execute what is begun, until this task is cancelled."""
        while True:
            call, done = await self._calls.get()
            if done.done():
                continue
            try:
                self.require()
                found, error = await self._loop.in_caller(call), None
            except Exception as fault:
                alone = isinstance(fault, UserError) and (self.lost or not self._ended())
                found, error = None, fault if alone else self._lose(fault)
            if done.done():
                continue
            if error is None:
                done.set_result(found)
            else:
                done.set_exception(error)

    def _lose(self, error: Exception) -> Refused:
        """The ranks are in an unknown state, or gone: all that wait, and all that come, get their error."""
        if not isinstance(error, CorerlError):
            traceback.print_exception(error)  # a fault of the server's own
        self.lost = (
            f"the model is lost: {message_of(error)}; restart `corerl serve`, and resume from the last saved state"
        )
        self._notify(self.lost)
        self._futures.fail_all(failure(self.lost, "server"))
        return Refused(self.lost, category="server")


class Turns:
    """The requests of one model: each is executed once those of all lower numbers were."""

    def __init__(self, order: Order, futures: Futures, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._order, self._futures, self._clock = order, futures, clock
        self._waiting: dict[int, tuple[Promise, Call]] = {}
        self._moved = clock()
        self.next = 1  # the number that is executed next

    def add(self, number: int, promise: Promise, call: Call) -> None:
        if not self._waiting:
            self._moved = self._clock()
        self._waiting[number] = promise, call
        while self.next in self._waiting:
            promise, call = self._waiting.pop(self.next)
            self._futures.fill(promise, self._order.begin(call))
            self.next += 1
            self._moved = self._clock()

    def close_gap(self) -> str:
        """Refuse what waits for a number that does not come, and go on after it. Returns why, if there was one."""
        if not self._waiting or self._clock() < self._moved + GAP_SECONDS:
            return ""
        sentence = (
            f"request {self.next} of this model has not arrived in {GAP_SECONDS:.0f} s; those after it are refused"
        )
        self.give_up(sentence)
        return sentence

    def give_up(self, sentence: str) -> None:
        """Refuse all that waits."""
        for promise, _ in self._waiting.values():
            self._futures.settle(promise, failure(sentence, "user"))
        self.next = max(self._waiting, default=self.next - 1) + 1
        self._waiting.clear()
