"""A call with room for all that it calls. Python takes the memory of frames in pieces of 16 KiB and gives one back when
its first frame ends: where a loop is at the edge of a piece, each call in it asks the system for memory, which takes as
long as five hundred calls, and a test is at some edge for much of its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WORDS = 33_000  # of 8 bytes: a piece is of double sizes until it holds a frame, and these leave nearly half of 512 KiB


def with_room(call: Callable[[], T]) -> T:
    return call()


with_room.__code__ = with_room.__code__.replace(co_stacksize=WORDS)
