"""Data that many processes read: put into the object store once, passed on as a reference."""

from __future__ import annotations

from typing import Any

import ray


def share(value: Any) -> Any:
    """A reference that any process call accepts in the value's place; arrays in it are then read without a copy."""
    return ray.put(value)
