"""Event loops in threads of their own, for coroutines that synchronous code starts and waits for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

IDLE = "idle"  # the name of a thread that waits for a call of `in_thread`
IDLE_SECONDS = 5.0  # after which it ends
HEARING_SECONDS = 1.0  # Ctrl-C just before the main thread begins to wait is heard only when that wait ends
CLOSE_SECONDS = 10.0  # for what blocks the thread, such as code of the user's


Call: TypeAlias = tuple[str, Callable[[], Any], "Future[Any]"]  # name, function, and where its result goes
_idle: list[queue.SimpleQueue[Call]] = []  # of threads with nothing to do, where they wait


class _Loop(asyncio.SelectorEventLoop):
    """Is woken once for all that other threads have for it until it looks: each waking is a system call, at which the
    caller loses Python's lock and waits for it again."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived: deque[tuple[asyncio.Handle, Callable[[], object]]] = deque()
        self._woken = False

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = contextvars.copy_context()  # the caller's, as `_take` runs in that of the first who called
        handle = asyncio.Handle(callback, args, self, context)
        self._arrived.append((handle, functools.partial(self.call_soon, callback, *args, context=context)))
        if not self._woken or self.is_closed():  # which is told there
            self._woken = True
            super().call_soon_threadsafe(self._take)
        return handle

    def _take(self) -> None:
        self._woken = False  # first: what arrives from now on may come too late for this
        while self._arrived:
            handle, call = self._arrived.popleft()
            if not handle.cancelled():
                call()


class EventLoop:
    """An event loop that runs until `close`, in a daemon thread: at exit nothing must wait for it."""

    def __init__(self, name: str) -> None:
        self._loop = _Loop()
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # for the thread in `run`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, from any thread; cancelling the future cancels it. Raises RuntimeError once closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()  # or Python would warn that nobody has awaited it
            raise

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
                    if (call := self._calls.get(timeout=HEARING_SECONDS)) is not None:
                        call()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    async def in_caller(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread that waits in `run`, or will: where a program's main thread is needed."""
        done: Future[T] = Future()

        def call() -> None:
            _called(function, done)()
            if not done.cancelled() and isinstance(error := done.exception(), KeyboardInterrupt):
                raise error

        self._calls.put(call)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Cancel all tasks and end the thread; returns once it has ended, or hangs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
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


def in_coroutine() -> bool:
    """Whether the caller is one, or is called by one: it must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Call `function` in a daemon thread that has nothing else to do: one that never returns keeps neither the program
    nor others from ending. If the awaiting task is cancelled, the call goes on, and its result is dropped. Later calls
    may come in the same thread, with a context of their own."""
    done: Future[T] = Future()
    call = (name, function, done)
    try:
        _idle.pop().put(call)
    except IndexError:
        calls = queue.SimpleQueue[Call]()
        calls.put(call)
        threading.Thread(target=_serve, args=(calls,), daemon=True).start()
    return await asyncio.wrap_future(done)


def _serve(calls: queue.SimpleQueue[Call]) -> None:
    """Answer what comes, until nothing has for a while; a thread for each call would cost a millisecond to start."""
    thread = threading.current_thread()
    while True:
        try:
            name, function, done = calls.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            try:
                _idle.remove(calls)
            except ValueError:  # a call is on its way
                continue
            return
        thread.name = name
        settle = contextvars.Context().run(_called, function, done)
        thread.name = IDLE
        _idle.append(calls)  # first: who hears of the result may call again
        settle()
        del function, done, settle  # and what they hold


def _called(function: Callable[[], T], done: Future[T]) -> Callable[[], None]:
    """Call the function; what it returns settles `done`."""
    if not done.set_running_or_notify_cancel():
        return lambda: None
    try:
        return functools.partial(done.set_result, function())
    except BaseException as error:
        return functools.partial(done.set_exception, error)
