"""What tests of rewards share."""

import sys
from types import ModuleType

import pytest


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module of the user's."""
    module = ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module
