"""Run the users' coroutines: one event loop per process, in a thread, so that they can share loop-bound objects."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
_beginning = threading.Lock()


def begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine, from any other thread; the result is its future."""
    global _loop
    with _beginning:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(_loop,), name="users' coroutines", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop forever. A SystemExit in a task fails that task alone; asyncio would also let it stop the loop, and
    with it all other tasks."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
