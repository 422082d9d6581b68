"""DeepSpeed in the conformance suite: stage 2 of ZeRO, whose parameters are whole on each rank, as far as stage 3."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from corerl_testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too

pytestmark = pytest.mark.nightly  # `make test` has stage 2 as a variant of the spec


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "deepspeed"


@pytest.fixture(scope="session")
def backend_options() -> Callable[[int], Mapping[str, Any]]:
    return lambda level: {"stage": 2}
