"""The plain backend in the conformance suite, as a third party's backend would be; and against bare torch."""

import pytest

from corerl_testing.subject import CASES, Runs
from corerl_testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too
from tests.bare_loop import assert_follows_a_bare_loop


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "plain"


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_training_follows_a_loop_in_bare_torch(runs: Runs, kind: str, packing: str) -> None:
    assert_follows_a_bare_loop(runs, "plain", 1, kind, packing)
