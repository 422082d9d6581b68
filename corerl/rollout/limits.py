"""Run Python code of others in this thread, and end it where it takes longer than it may."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AGAIN = 0.1  # seconds after which it is raised once more


class TooLong(BaseException):
    """Raised inside the code; none of its own `except Exception` is meant to see it."""


class TimeLimit:
    """A context in which each block `with limit.each():` may take `seconds`; else TooLong is raised there.

    Between two steps of Python only: a C function is not interrupted. Blocks are run one after the other; one thread
    watches all of them.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watched = 0  # identifier of the thread whose block runs; 0: none runs
        self._deadline = 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="time limit", daemon=True)

    def __enter__(self) -> TimeLimit:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._watcher.ident is not None:
            self._watcher.join()

    @contextmanager
    def each(self) -> Iterator[None]:
        with self._changed:
            self._watched, self._deadline = threading.get_ident(), time.monotonic() + self._seconds
            self._changed.notify()
            if self._watcher.ident is None:
                _hush()
                self._watcher.start()
        try:
            yield
        finally:
            with self._changed:
                self._watched = 0
                _raise_in(threading.get_ident(), None)  # it may come too late to be seen there

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._deadline - time.monotonic() if self._watched else None
                if left is None or left > 0:
                    self._changed.wait(left)
                else:
                    _raise_in(self._watched, TooLong)
                    self._deadline = time.monotonic() + AGAIN  # a destructor may have swallowed it


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have the thread raise `kind` at its next step; None: no longer what it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind))


def _hush() -> None:
    """Have no traceback printed of a TooLong that a destructor has swallowed. The hook stays: limits of several threads
    overlap, and each would have to know which of them put it there."""
    hook = sys.unraisablehook
    if not (isinstance(hook, functools.partial) and hook.func is _without_too_long):
        sys.unraisablehook = functools.partial(_without_too_long, hook)


def _without_too_long(shown: Callable[[sys.UnraisableHookArgs], object], unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.exc_type is not TooLong:
        shown(unraisable)
