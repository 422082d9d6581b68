"""What several files of these tests need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from corerl_elastic import slots
from tests.driver.groups import Rooms


@pytest.fixture(autouse=True)
def fake_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms of `tests.driver.groups` say by themselves who gets which slot."""

    def of_fakes(name: str, of_pools: Callable[..., Any]) -> Callable[..., Any]:
        return lambda pool, *args: getattr(pool, name)(*args) if isinstance(pool, Rooms) else of_pools(pool, *args)

    for name in ("arranged", "without_lost"):
        monkeypatch.setattr(slots, name, of_fakes(name, getattr(slots, name)))
