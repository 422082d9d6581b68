"""How a run's parts that sample are put together."""

from __future__ import annotations

import pytest

from corerl.config.schema import RolloutConfig
from corerl.driver.sampling import rows_of_a_call
from corerl.engines.base import UNLIMITED


@pytest.mark.parametrize(
    ("source", "replicas", "calls", "rows"),
    [
        ("asynchronous", 2, 4, 8 * 4),  # an even share of a batch: 64 prompts over 8 calls
        ("asynchronous", 3, 1, 21 * 4),
        ("asynchronous", 100, 1, 4),  # never less than a group
        ("streamed", 2, 1, 8 * 4),  # a quarter of an engine's share, one call after the other
        ("streamed", 2, 16, 2 * 4),  # a sixteenth: all calls at once hold it
        ("streamed", 2, 30, 2 * 4),  # 16 of them hold it; with less in each, 30 would not
        ("streamed", 2, 128, 4),
        ("synchronous", 2, 4, UNLIMITED),
        ("one-step-off", 2, 4, UNLIMITED),
    ],
)
def test_a_call_gets_at_most_its_share_of_a_step(source: str, replicas: int, calls: int, rows: int) -> None:
    rollout = RolloutConfig(source=source, prompts=64, samples=4)  # type: ignore[arg-type]
    assert rows_of_a_call(rollout, replicas=replicas, calls=calls) == rows
