"""Event loops in threads of their own, for coroutines that synchronous code starts and waits for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

SIGNAL_SECONDS = 1.0  # Ctrl-C just before the main thread begins to wait is noticed only when that wait ends
CLOSE_SECONDS = 10.0  # for what blocks the thread, such as code of the user's


class EventLoop:
    """An event loop that runs until `close`, in a daemon thread: at exit nothing must wait for it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._closing = threading.Lock()  # what begins before it closes is among the tasks that are cancelled
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # for the thread in `run`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, from any thread; cancelling the future cancels it. Raises RuntimeError once `close` has
        been called."""
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()  # or Python would warn that nobody has awaited it
        raise RuntimeError("the event loop is closed")

    @property
    def inside(self) -> bool:
        """Whether the calling thread is the loop's own, which must not wait for coroutines of the loop."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, and call what any coroutine passes to `in_caller` meanwhile. For one thread at a time;
        if it is interrupted, the coroutine is cancelled."""
        future = self.begin(work)
        future.add_done_callback(lambda _: self._calls.put(None))
        try:
            while not future.done():
                with contextlib.suppress(queue.Empty):
                    if (call := self._calls.get(timeout=SIGNAL_SECONDS)) is not None:
                        call()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    async def in_caller(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread that waits in `run`, or will: where a program's main thread is needed."""
        done: Future[T] = Future()

        def call() -> None:
            _call(function, done)
            if not done.cancelled() and isinstance(error := done.exception(), KeyboardInterrupt):
                raise error

        self._calls.put(call)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Cancel all tasks and end the thread; returns once it has ended, or hangs. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.inside:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        """Run the loop. A SystemExit in a task fails that task alone; asyncio would also let it stop the loop, and with
        it all other tasks."""
        self._run_until(lambda: self._closed)
        ending = self._loop.create_task(_cancelled(asyncio.all_tasks(self._loop)))
        ending.add_done_callback(lambda _: self._loop.stop())
        self._run_until(ending.done)
        self._loop.close()

    def _run_until(self, over: Callable[[], bool]) -> None:
        while not over():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()


_users: EventLoop | None = None
_starting_users = threading.Lock()


def start_user_coroutine(work: Coroutine[Any, Any, T], *, name: str = "") -> Future[T]:
    """Start a coroutine of the user's, as a task of this name, from any other thread. All of a process share one loop,
    so that they can share loop-bound objects; it is not one of CoreRL's loops, which they could block."""
    global _users
    with _starting_users:
        if _users is None:
            _users = EventLoop("users' coroutines")
    return _users.begin(_named(work, name) if name else work)


async def _named(work: Coroutine[Any, Any, T], name: str) -> T:
    if (task := asyncio.current_task()) is not None:
        task.set_name(name)
    return await work


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Call `function` in a daemon thread of its own: one that never returns keeps neither the program nor others from
    ending, as a thread of asyncio's executor would. If the awaiting task is cancelled, the call goes on, and its result
    is dropped."""
    done: Future[T] = Future()
    call = contextvars.Context().run
    threading.Thread(target=call, args=(_call, function, done), name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


def _call(function: Callable[[], T], done: Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(function())
    except BaseException as error:
        done.set_exception(error)
