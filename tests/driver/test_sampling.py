"""How a run's parts that sample are put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.config.schema import RolloutConfig
from corerl.data.prompts import Prompt
from corerl.driver.sampling import rows_of_a_call
from corerl.engines.base import UNLIMITED
from corerl.errors import RewardError
from tests.in_process import execute_here, small


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


def right_and_length(prompt: Prompt, response: str) -> dict[str, float]:
    return {"right": float(len(response) > 3), "length": 0.1 * len(response)}


def test_a_resumed_run_looks_for_the_part_that_decides_anew(tmp_path: Path) -> None:
    given = [f"reward.name={__name__}:right_and_length", "checkpoint.every=1", "train.schedule.steps=4"]
    execute_here(small(tmp_path, *given, "run.steps=1"))
    resumed = [*given, "run.steps=2", "checkpoint.resume=auto", "algorithm.dynamic_sampling=1"]
    with pytest.raises(RewardError, match="dynamic_sampling_on: 'rigth' is no part of the reward; .* mean 'right'"):
        execute_here(small(tmp_path, *resumed, "algorithm.dynamic_sampling_on=rigth"))
    assert execute_here(small(tmp_path, *resumed, "algorithm.dynamic_sampling_on=right")).steps_done == 2
