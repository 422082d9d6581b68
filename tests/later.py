"""A library that is imported when the first test uses it: each process of pytest collects all files, and runs some."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Later:
    """What the module `name` has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks whether this is a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def wants(name: str) -> pytest.MarkDecorator:
    """Skips tests where the package is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"wants {name}")
