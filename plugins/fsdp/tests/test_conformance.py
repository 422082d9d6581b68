"""FSDP in the conformance suite; and against bare torch."""

import pytest

from corerl.plugin import Variant
from corerl_testing import CASES, Runs, with_variants
from corerl_testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too
from tests.bare_loop import assert_follows_a_bare_loop


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "fsdp"


@pytest.fixture(scope="session", params=with_variants("fsdp"))
def backend_variant(request: pytest.FixtureRequest) -> Variant | None:
    variant: Variant | None = request.param
    return variant


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_training_follows_a_loop_in_bare_torch(runs: Runs, world_size: int, kind: str, packing: str) -> None:
    assert_follows_a_bare_loop(runs, "fsdp", world_size, kind, packing)
