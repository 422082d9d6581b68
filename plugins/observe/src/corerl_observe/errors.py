"""Write what goes with an error, without taking its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noting_failures(error: BaseException) -> Iterator[None]:
    """Run a block that records details of `error`. If it fails, add a note to `error` instead of raising."""
    try:
        yield
    except Exception as failed:
        error.add_note(f"additionally, writing what goes with it failed: {failed}")
