"""Everything that CoreRL asks of a training backend; checks that a later CoreRL adds come with it."""

import pytest

from corerl.testing.suite import *  # noqa: F403  -- the checks and nothing else


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "mine"
