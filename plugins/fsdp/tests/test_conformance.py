"""FSDP in the conformance suite."""

import pytest

from corerl.plugin import Variant
from corerl_testing import with_variants
from corerl_testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "fsdp"


@pytest.fixture(scope="session", params=with_variants("fsdp"))
def backend_variant(request: pytest.FixtureRequest) -> Variant | None:
    variant: Variant | None = request.param
    return variant
