"""Megatron in the conformance suite."""

import pytest

from corerl.testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "megatron"
