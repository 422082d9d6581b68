"""Requests that wait for one engine, against an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.batching import Batcher
from corerl.errors import EngineFailed
from tests.engines.services import generation_of, request_of


def rows(first: int, count: int, **params: Any) -> GenerateRequest:
    """`count` rows of two tokens, the noise key of the first of which is `first`."""
    return request_of([[0, 1]] * count, first_key=first, **params)


class Engine:
    """One token for each row, its noise key; calls wait until they are let go."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []  # noise keys
        self.counted: list[bool] = []
        self.dead = False
        self.failure: Exception | None = None
        self._going: list[asyncio.Event] = []

    async def __call__(self, request: GenerateRequest, on_ended: Any) -> Generation | None:
        self.calls.append(request.noise_keys.tolist())
        self.counted.append(on_ended is not None)
        self._going.append(asyncio.Event())
        await self._going[-1].wait()
        if self.failure is not None:
            raise self.failure
        if self.dead:
            return None
        return generation_of([[key] for key in request.noise_keys.tolist()])

    async def answer(self, call: int) -> None:
        self._going[call].set()
        await settled()


async def settled() -> None:
    """Until nothing goes on by itself any more."""
    for _ in range(20):
        await asyncio.sleep(0)


def drawn(task: asyncio.Task[Generation | None]) -> list[int] | None:
    generation = task.result()
    return None if generation is None else generation.tokens.tolist()


def batched(calls: int, width: int) -> tuple[Engine, Batcher]:
    engine = Engine()
    return engine, Batcher(engine, calls=calls, width=width)


def begin(work: Coroutine[Any, Any, Generation | None]) -> asyncio.Task[Generation | None]:
    return asyncio.ensure_future(work)


def test_waiting_requests_are_sent_together_up_to_the_width() -> None:
    async def run() -> None:
        engine, batcher = batched(calls=1, width=4)
        tasks = [begin(batcher.generate(rows(10 * number, 2), number=number)) for number in (3, 1, 2)]
        await settled()
        assert engine.calls == [[10, 11, 20, 21]]
        late = begin(batcher.generate(rows(0, 1), number=-1))  # urgent
        await settled()
        await engine.answer(0)
        assert [drawn(task) for task in tasks[1:]] == [[10, 11], [20, 21]]
        assert engine.calls[1] == [0, 30, 31] and not tasks[0].done()
        await engine.answer(1)
        assert (drawn(late), drawn(tasks[0])) == ([0], [30, 31])

    asyncio.run(run())


def test_cancelled_requests_are_not_sent() -> None:
    async def run() -> None:
        engine, batcher = batched(calls=1, width=100)
        under_way = [begin(batcher.generate(rows(10 * number, 1), number=number)) for number in range(2)]
        await settled()
        waiting = [begin(batcher.generate(rows(10 * number, 1), number=number)) for number in (2, 3)]
        await settled()
        under_way[0].cancel()
        waiting[0].cancel()
        await settled()
        await engine.answer(0)
        assert engine.calls == [[0, 10], [30]] and drawn(under_way[1]) == [10]
        await engine.answer(1)
        assert drawn(waiting[1]) == [30]

    asyncio.run(run())


def test_a_failure_reaches_all_requests_of_the_call() -> None:
    async def run() -> None:
        engine, batcher = batched(calls=1, width=1)
        tasks = [begin(batcher.generate(rows(number, 1), number=number)) for number in range(3)]
        await settled()
        engine.dead = True
        batcher.hand_back()
        await engine.answer(0)
        assert [drawn(task) for task in tasks] == [None] * 3 and engine.calls == [[0]]

        engine, batcher = batched(calls=1, width=100)
        engine.failure = EngineFailed("no memory")
        tasks = [begin(batcher.generate(rows(number, 1), number=number)) for number in range(2)]
        await settled()
        await engine.answer(0)
        for task in tasks:
            with pytest.raises(EngineFailed, match="^no memory$"):
                task.result()

    asyncio.run(run())
