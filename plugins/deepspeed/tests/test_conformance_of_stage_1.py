"""DeepSpeed in the conformance suite: stage 1 of ZeRO."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from corerl.testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "deepspeed"


@pytest.fixture(scope="session")
def backend_options() -> Callable[[int], Mapping[str, Any]]:
    return lambda level: {"stage": 1}
