"""Coroutines beside synchronous code."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from corerl.event_loop import EventLoop, in_thread

LIMIT = 60.0  # seconds, against hangs


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop("tested")
    yield made
    made.close()
    assert all(thread.name != "tested" for thread in threading.enumerate())


async def name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_an_interrupted_caller_cancels_the_coroutine(loop: EventLoop) -> None:
    cancelled = threading.Event()

    def interrupted() -> None:
        raise KeyboardInterrupt

    async def work() -> None:
        try:
            await asyncio.gather(loop.in_caller(interrupted), asyncio.sleep(LIMIT))
        except BaseException:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert cancelled.wait(LIMIT)
    assert loop.run(name()) == "tested"  # what was left behind does not disturb


@pytest.mark.parametrize("turns", range(6))
def test_an_exit_while_closing_still_cancels_other_tasks(turns: int, recwarn: pytest.WarningsRecorder) -> None:
    loop, ended = EventLoop("exits"), list[str]()

    async def waits() -> None:
        try:
            await asyncio.sleep(LIMIT)
        finally:
            ended.append("waits")

    async def closes_and_exits() -> None:
        loop.close()  # does not wait for its own thread
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append("exits")
        raise SystemExit

    waiting, exiting = loop.begin(waits()), loop.begin(closes_and_exits())
    (thread,) = (each for each in threading.enumerate() if each.name == "exits")
    thread.join(LIMIT)
    assert not thread.is_alive() and waiting.done() and exiting.done()
    assert "waits" in ended  # the other may have been cancelled first
    gc.collect()
    assert [str(each.message) for each in recwarn] == []


def test_what_begins_while_the_loop_closes_is_refused(loop: EventLoop) -> None:
    refused = list[str]()

    async def begins_as_it_is_cancelled() -> None:
        try:
            await asyncio.sleep(LIMIT)
        finally:
            try:
                loop.begin(name())
            except RuntimeError as error:
                refused.append(str(error))

    loop.begin(begins_as_it_is_cancelled())
    loop.run(name())
    loop.close()
    assert refused == ["the event loop is closed"]


def test_closing_cancels_tasks_and_leaves_hung_threads() -> None:
    loop, go, ended = EventLoop("tested"), threading.Event(), threading.Event()

    async def work() -> None:
        try:
            await in_thread(lambda: go.wait(LIMIT), name="hangs")
        finally:
            ended.set()

    future = loop.begin(work())
    loop.run(name())
    loop.close()
    loop.close()
    assert ended.is_set() and future.cancelled()
    go.set()
    with pytest.raises(RuntimeError, match="closed"):
        loop.begin(name())
