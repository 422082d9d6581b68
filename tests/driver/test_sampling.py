"""What a run samples with follows from its config and from the checkpoint that it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.data.prompts import Prompt
from corerl.errors import RewardError
from tests.in_process import execute_here, small


def right_and_length(prompt: Prompt, response: str) -> dict[str, float]:
    return {"right": float(len(response) > 3), "length": 0.1 * len(response)}


def test_a_resumed_run_looks_for_the_part_that_decides_anew(tmp_path: Path) -> None:
    given = [f"reward.name={__name__}:right_and_length", "checkpoint.every=1", "train.schedule.steps=4"]
    execute_here(small(tmp_path, *given, "run.steps=1"))
    resumed = [*given, "run.steps=2", "checkpoint.resume=auto", "algorithm.dynamic_sampling=1"]
    with pytest.raises(RewardError, match="dynamic_sampling_on: 'rigth' is no part of the reward; .* mean 'right'"):
        execute_here(small(tmp_path, *resumed, "algorithm.dynamic_sampling_on=rigth"))
    assert execute_here(small(tmp_path, *resumed, "algorithm.dynamic_sampling_on=right")).steps_done == 2
