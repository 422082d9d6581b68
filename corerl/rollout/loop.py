"""Run the users' coroutines in one event loop per process, so that they can share loop-bound objects; not in one of
CoreRL's own, which they could block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from corerl.event_loop import EventLoop

T = TypeVar("T")

_loop: EventLoop | None = None
_beginning = threading.Lock()


def begin(work: Coroutine[Any, Any, T], *, name: str = "") -> Future[T]:
    """Start a coroutine, as a task of this name, from any other thread; the result is its future."""
    global _loop
    with _beginning:
        if _loop is None:
            _loop = EventLoop("users' coroutines")
    return _loop.begin(_named(work, name) if name else work)


async def _named(work: Coroutine[Any, Any, T], name: str) -> T:
    if (task := asyncio.current_task()) is not None:
        task.set_name(name)
    return await work
