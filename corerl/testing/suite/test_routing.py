"""Routed experts: what a backend reports, and what it replays."""

from __future__ import annotations

import pytest

from corerl.plugin.capabilities import Capability
from corerl.testing.marks import check
from corerl.testing.routing import assert_replays
from corerl.testing.scenarios import training
from corerl.testing.subject import PACKINGS, Subject


@check("C60", level=1, needs=[Capability.ROUTING_REPLAY, Capability.MOE], builds_on=["C15", "C51"])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_experts_are_told_as_routers_choose_them_and_trained_through_as_they_are_told(
    subject: Subject, packing: str
) -> None:
    setup = subject.setup("qwen3-moe", PACKINGS[packing])
    assert_replays(
        subject.model("qwen3-moe"), lambda samples: subject.run(training.replay_experts, setup, samples, 0.02)
    )
