"""examples/plugins/extension: a run stops once its metric has been high enough."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.end_to_end.command import Command, numbers, write_small

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/plugins/extension"


@pytest.mark.processes
def test_a_run_stops_once_its_metric_was_high_enough(tmp_path: Path) -> None:
    """Every sample's reward is 0.25."""
    (point,) = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"].values()
    name = point["enough"]  # the spec, as if it were installed
    enough = f"{{name='{name}', options={{value=0.25, steps=2}}}}"
    overrides = [
        f"run.dir={tmp_path}/run",
        f"extensions=[{{name='console'}}, {{name='jsonl'}}, {enough}]",
        "reward.name=tests.end_to_end.user_functions:constant",
        "roles.actor.ranks=1",
    ]
    with Command("train", write_small(tmp_path), *overrides, logs=tmp_path, directory=EXAMPLE) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    assert "note: rollout/reward has been 0.25 or more for 2 steps: enough" in command.out
    rewards = [row["rollout/reward"] for row in numbers(tmp_path / "run") if "rollout/reward" in row]
    assert rewards == [0.25, 0.25]  # of six steps
    assert (tmp_path / "run/checkpoints/step-00000002/checkpoint.json").exists()
