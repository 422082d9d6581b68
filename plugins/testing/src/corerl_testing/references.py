"""What backends are compared with and have no part in, such as transformers' numbers: computed once in a process."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def reference(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, asked once for equal arguments: plain data, and directories whose files stay as they are. All callers
    get the same result, which none may change."""
    known: dict[bytes, T] = {}

    @functools.wraps(function)
    def remembering(*args: Any, **named: Any) -> T:
        asked = pickle.dumps((args, named))
        if asked not in known:
            known[asked] = function(*args, **named)
        return known[asked]

    return remembering
