from __future__ import annotations

from collections.abc import Iterator

import pytest

from corerl.event_loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop("tested")
    yield made
    made.close()
