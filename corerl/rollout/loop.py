"""Run the users' coroutines in one event loop per process, so that they can share loop-bound objects; not in one of
CoreRL's own, which they could block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from corerl.event_loop import EventLoop

T = TypeVar("T")

_loop: EventLoop | None = None
_beginning = threading.Lock()
# The sample that the caller of `begin` works on: tasks inherit it from whoever creates them.
SAMPLE: ContextVar[int | None] = ContextVar("SAMPLE", default=None)
_samples: WeakKeyDictionary[asyncio.Task[Any], int | None] = WeakKeyDictionary()  # of tasks, once they are noted
_noted: asyncio.AbstractEventLoop | None = None  # the loop, once its tasks are noted


def begin(work: Coroutine[Any, Any, T], *, name: str = "") -> Future[T]:
    """Start a coroutine, as a task of this name, from any other thread; the result is its future."""
    global _loop
    with _beginning:
        if _loop is None:
            _loop = EventLoop("users' coroutines")
    return _loop.begin(_named(work, name) if name else work)


def note_samples() -> None:
    """From now on remember of each task which sample it is for, so that `blocking` can tell."""

    async def note() -> None:
        global _noted
        _noted = asyncio.get_running_loop()
        _noted.set_task_factory(_task)

    begin(note()).result()


def _task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **settings: Any
) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **settings)
    _samples[task] = SAMPLE.get()
    return task


def blocking(seconds: float) -> int | None:
    """The sample whose code has blocked the loop for this long, if there is one and it is known. For one that never
    gives up Python's lock, as a regular expression, this does not return."""
    if _noted is None:
        return None
    heard, before = threading.Event(), asyncio.current_task(_noted)
    _noted.call_soon_threadsafe(heard.set)
    if heard.wait(seconds):
        return None
    task = asyncio.current_task(_noted)  # another one than before: many take a little each
    return _samples.get(task) if task is not None and task is before else None


async def _named(work: Coroutine[Any, Any, T], name: str) -> T:
    if (task := asyncio.current_task()) is not None:
        task.set_name(name)
    return await work
