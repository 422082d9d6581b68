"""Futures: what calls to groups of processes return, to wait for, to poll or to await, singly or several at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from corerl.cluster.group import RayGroup

Name = TypeVar("Name")
T = TypeVar("T")
Other = TypeVar("Other")

POLL_SECONDS = 0.1  # per group when polling several


class Future(Generic[T]):
    """The result or the error of a call in progress. Whoever asks for it, in whatever way and however often, gets the
    same."""

    def __init__(
        self,
        group: object,
        ready: Callable[[float], bool],
        fetch: Callable[[], T],
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`fetch` waits for the call and returns its result or raises its error; `ready` says whether it would do so at
        once, after at most so many seconds. `group` runs its calls one after another; it is only compared. `on_error`
        gets the error once somebody was given it."""
        self.group = group
        self._ready = ready
        self._fetch: Callable[[], T] | None = fetch  # None: the call has ended
        self._on_error = on_error
        self._result: T | None = None
        self._error: Exception | None = None
        self._fetching = threading.Lock()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call; returns its result or raises its error. Raises TimeoutError after `timeout` seconds; the
        call goes on."""
        if timeout is not None and not self.ready(timeout):
            raise TimeoutError(f"the call has not ended within {timeout:g} s; it goes on: ask again, or wait longer")
        try:
            return self.outcome()
        except Exception as error:
            self._on_error(error)
            raise

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self.ready(0.0)

    def ready(self, timeout: float) -> bool:
        """Like `done`, but waits at most `timeout` seconds for that."""
        until = time.monotonic() + timeout
        if not self._fetching.acquire(timeout=max(0.0, timeout)):
            return False  # another thread waits for the call
        try:
            return self._fetch is None or self._ready(max(0.0, until - time.monotonic()))
        finally:
            self._fetching.release()

    def __await__(self) -> Generator[Any, None, T]:
        """Wait as `result` does, while the event loop runs other tasks. If the awaiting task is cancelled, the call
        goes on."""
        if self._fetch is not None:
            yield from self._ended().__await__()
        return self.result()

    def then(self, function: Callable[[T], Other]) -> Future[Other]:
        """The future of what `function` makes of the result, which is computed when it is first asked for."""
        return Future(self.group, self.ready, lambda: function(self.outcome()), self._on_error)

    def outcome(self) -> T:
        """Like `result`, for those who pass the error on: it counts as unread."""
        with self._fetching:
            if self._fetch is not None:
                try:
                    self._result = self._fetch()
                except Exception as error:
                    self._error = error
                self._fetch = None  # with all that it refers to
                self._ready = lambda timeout: True
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    async def _ended(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            try:
                with contextlib.suppress(Exception):  # the future keeps it
                    self.outcome()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has been closed, after the await was cancelled
                    loop.call_soon_threadsafe(ended.set)

        # A thread of its own: all of an executor's could wait for groups that wait for one that has failed.
        threading.Thread(target=wait, name="awaited call", daemon=True).start()
        await ended.wait()


class Calls:
    """The calls of one group, as futures. An error that ends the group is that of the call it happened in, and of all
    calls after it, whichever is asked first. No error is lost: those that nobody was given can be raised later."""

    def __init__(self, group: RayGroup) -> None:
        self._group = group
        self._running: list[Future[Any]] = []  # in order; changed by one operation at a time, as any thread may
        self._cause: Exception | None = None  # why the group has ended
        self._unread: list[Exception] = []

    def add(self, pending: Any, merge: Callable[[list[Any]], T]) -> Future[T]:
        """The future of what `merge` makes of the members' results. Calls are to be added as they are started."""
        future: Future[T] = Future(
            self._group,
            lambda timeout: self._group.ready(pending, timeout),
            lambda: self._fetch(future, pending, merge),
            self._given,
        )
        self._running.append(future)
        return future

    def wait(self) -> None:
        """Wait until all calls have ended; raises nothing."""
        for future in list(self._running):
            with contextlib.suppress(Exception):  # kept as unread
                future.outcome()

    def raise_unread(self) -> None:
        """Raise the first error that nobody was given, if there is any."""
        if self._unread:
            raise self._unread.pop(0)

    def _fetch(self, future: Future[T], pending: Any, merge: Callable[[list[Any]], T]) -> T:
        for earlier in takewhile(lambda each: each is not future, list(self._running)):
            with contextlib.suppress(Exception):  # kept as unread
                earlier.outcome()
        try:
            if self._cause is not None:
                raise self._cause
            result = merge(self._group.wait(pending))
        except Exception as error:
            if error is not self._cause:
                self._unread.append(error)
                self._cause = error if self._group.ended else None
            self._running.remove(future)
            raise
        self._running.remove(future)
        return result

    def _given(self, error: Exception) -> None:
        with contextlib.suppress(ValueError):  # given before
            self._unread.remove(error)


def wait_all(futures: Mapping[Name, Future[T]]) -> dict[Name, T]:
    """Wait for all futures; returns the results by name. The first error of any group is raised at once, since the
    other groups may be waiting for the failed one until a timeout."""
    results: dict[Name, T] = {}
    while len(results) < len(futures):
        busy: list[object] = []
        for name, future in futures.items():
            if name in results or future.group in busy:
                continue
            if len(futures) - len(results) == 1 or future.ready(POLL_SECONDS):
                results[name] = future.result()
            else:
                busy.append(future.group)
    return {name: results[name] for name in futures}
