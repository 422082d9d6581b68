"""Speed up large imports, such as torch and transformers, and tell when something else can be imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

Where = tuple[
    tuple[str, int], ...
]  # places of sys.path, with the time in ns of each one's last change; 0 if it is none


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block, and exclude what exists at its end from later collections.

    Modules stay loaded, yet walking their objects takes a fifth of the time to import torch and transformers, and later
    a third of a second per collection, on one rank while the others wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def importable() -> Where:
    """As long as this stays the same, nothing is installed, upgraded or removed."""
    return tuple((path, _changed(path or os.curdir)) for path in sys.path)


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
