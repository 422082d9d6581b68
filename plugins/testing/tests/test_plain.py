"""The plain backend in the conformance suite, as a third party's backend would be; and against bare torch."""

import math

import pytest

from corerl_testing.compare import together
from corerl_testing.scenarios import training
from corerl_testing.subject import CASES, Runs
from corerl_testing.suite import *  # noqa: F403  -- the checks and nothing else, new ones too
from tests.bare_loop import assert_follows_a_bare_loop, assert_same_steps, bare_run
from tests.reference import Settings


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "plain"


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_training_follows_a_loop_in_bare_torch(runs: Runs, kind: str, packing: str) -> None:
    assert_follows_a_bare_loop(runs, "plain", 1, kind, packing)


def test_a_steps_own_settings_are_those_of_torchs_adamw(runs: Runs) -> None:
    found = together(runs.of_plain(training.train_with, "qwen3", training.SETTINGS))
    written_out = (
        Settings(betas=(0.3, 0.6), clip_norm=0.05),
        Settings(eps=1e-2, decay=20.0, clip_norm=math.inf),
        Settings(betas=(0.0, 0.9), decay=0.0),
        Settings(),
    )
    assert_same_steps(found, bare_run(runs.models["qwen3"], len(training.SETTINGS), written_out))
