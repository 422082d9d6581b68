"""DeepSpeed in the conformance suite, with its defaults: ZeRO-3."""

import pytest

from corerl.testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "deepspeed"
