"""Run CoreRL's conformance suite on this backend; new checks come with new versions of CoreRL."""

import pytest

from corerl_testing.suite import *  # noqa: F403  -- the checks and nothing else


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "mine"
