"""The order of work: what waits for the thread of the group, and the requests of a model by their numbers, in whatever
order they arrive."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

from attrs import define, field
from tinker.types import TrainingRun

from corerl_tinker.requests import Refused

T = TypeVar("T")
GAP_SECONDS = 600.0  # clients repeat a request for 300 s, then give it up, and number the next one all the same


@define(eq=False)
class Asked:
    """Something that waits for its turn."""

    what: Any
    work: Callable[[Sequence[Any]], Sequence[Any]]  # of all that is done together, what comes of each
    key: Hashable  # the same for all that can be done together
    answer: asyncio.Future[Any] = field(factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """The queue of the group's thread. What waits under one key is done in one turn, that of the first of it: passes
    fill micro-batches together, and engines are sent weights once for all who sample from them."""

    def __init__(self, call: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """`call` calls a function in the thread of the group."""
        self._call = call
        self._waiting: dict[Hashable, list[Asked]] = {}  # by key, in the order of their turns
        self._working: asyncio.Task[None] | None = None

    async def ask(self, work: Callable[[Sequence[Any]], Sequence[Any]], what: Any, key: Hashable) -> Any:
        """What `work` makes of this."""
        asked = Asked(what, work, key)
        self.add(asked)
        return await asked.answer

    async def call(self, function: Callable[[], T]) -> T:
        """What a function returns that has its turn alone."""
        found: T = await self.ask(lambda _: [function()], None, object())
        return found

    def add(self, asked: Asked) -> None:
        self._waiting.setdefault(asked.key, []).append(asked)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop(next(iter(self._waiting)))
            taken = [each for each in waiting if not each.answer.done()]  # whoever asked may have gone
            try:
                work = partial(waiting[0].work, [each.what for each in taken])
                found = await self._call(work) if taken else []
                if len(found) != len(taken):
                    raise AssertionError(f"{len(found)} answers to {len(taken)} requests")
            except Exception as error:
                found = [error] * len(taken)
            for each, answer in zip(taken, found, strict=True):
                if each.answer.done():
                    if isinstance(answer, concurrent.futures.Future):
                        answer.cancel()
                elif isinstance(answer, Exception):
                    each.answer.set_exception(answer)
                else:
                    each.answer.set_result(answer)


@define(kw_only=True, eq=False)
class Model:
    """A model that a session trains."""

    id: str
    session: str
    turns: Turns
    clock: Callable[[], float]
    run: TrainingRun | None = None  # None: it is not created yet, or has ended
    incomplete: str = ""  # why the gradients so far are not those that the client means; empty: they are
    next: int = 1  # the number that has its turn next
    _waiting: dict[int, Asked] = field(factory=dict)
    _moved: float = 0.0
    _alone: int = 0  # how many had their turn that are done alone

    def add(self, number: int, asked: Asked) -> None:
        """Let a request have its turn after all requests with lower numbers. It is done together with those of its
        key that have no other between them; None is the key of what is done alone."""
        if not self._waiting:
            self._moved = self.clock()
        self._waiting[number] = asked
        while (following := self._waiting.pop(self.next, None)) is not None:
            self._moved, self.next = self.clock(), self.next + 1
            self._alone += following.key is None
            following.key = self.id, self._alone, following.key
            self.turns.add(following)

    def close_gap(self) -> None:
        """Refuse what waits for a number that does not come, and go on after it."""
        if self._waiting and self.clock() >= self._moved + GAP_SECONDS:
            self.incomplete = (
                f"request {self.next} of this model has not arrived in {GAP_SECONDS:.0f} s; those after it are refused"
            )
            self.give_up(self.incomplete)

    def give_up(self, sentence: str) -> None:
        """Refuse all that waits."""
        self.next = max(self._waiting, default=self.next - 1) + 1
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(Refused(sentence))
        self._waiting.clear()
