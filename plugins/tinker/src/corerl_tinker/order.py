"""Calls of the policy, one after the other in the one thread that drives the group: those of a model by their numbers,
in whatever order they arrive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from corerl.errors import CorerlError
from corerl.messages import one_line
from corerl.rollout import EventLoop
from corerl_tinker.futures import Answer, Futures, Promise, answered, failure
from corerl_tinker.requests import Refused

T = TypeVar("T")
Call = Callable[[], Answer]  # in the group's thread; may raise Refused

GAP_SECONDS = 600.0  # clients repeat a request for 300 s, then give it up, and number the next one all the same


class Order:
    """The queue of the group's thread, which is the one that waits in `EventLoop.run`."""

    def __init__(self, loop: EventLoop, futures: Futures, *, notify: Callable[[str], None]) -> None:
        self._loop, self._futures, self._notify = loop, futures, notify
        self._calls: asyncio.Queue[tuple[Promise | None, Call]] = asyncio.Queue()
        self.lost = ""  # why nothing is computed any more; empty: all is well

    def add(self, call: Call, promise: Promise | None = None) -> None:
        """Let `call` be executed after all that were added before."""
        if not self.lost:
            self._calls.put_nowait((promise, call))
        elif promise is not None:
            self._futures.settle(promise, failure(self.lost, "server"))

    async def in_turn(self, work: Callable[[], T]) -> T:
        """What `work` returns, executed after all that was added before."""
        if self.lost:
            raise CorerlError(self.lost)
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> Answer:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
                    raise
            return answered({})

        self.add(call)
        return await asyncio.wrap_future(done)

    async def work(self) -> None:
        """Execute what is added, until this task is cancelled."""
        while True:
            promise, call = await self._calls.get()
            if promise is not None and promise.answer is not None:
                continue  # given up meanwhile
            try:
                answer = await self._loop.in_caller(call)
            except Refused as refused:
                answer = failure(refused.sentence, "user")
            except Exception as error:
                self._lose(error)
                continue
            if promise is not None:
                self._futures.settle(promise, answer)

    def _lose(self, error: Exception) -> None:
        """The ranks are in an unknown state, or gone: all that wait, and all that come, get their error."""
        if not isinstance(error, CorerlError):
            traceback.print_exception(error)  # a fault of the server's own
        what = error.message if isinstance(error, CorerlError) else one_line(error)
        self.lost = f"the model is lost: {what}; restart `corerl serve`, and resume from the last saved state"
        self._notify(self.lost)
        while not self._calls.empty():
            self._calls.get_nowait()
        self._futures.fail_all(failure(self.lost, "server"))


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
            self._order.add(call, promise)
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
