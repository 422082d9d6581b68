"""`corerl train` with another backend, and nothing else changed: the same run."""

from __future__ import annotations

import pytest

from corerl_testing import GRAD_NORM
from tests.end_to_end.command import Command, metrics, write_small

pytestmark = pytest.mark.processes

RUNS = {
    "plain": ["backend.name=plain", "roles.actor.ranks=1"],
    # In several calls, of which each goes through the pipeline.
    "streamed": ["backend.name=megatron", "backends.megatron.pipeline_parallel=2", "rollout.source=streamed"],
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """By run, the metrics of each step."""
    found = {}
    for name, overrides in RUNS.items():
        directory = tmp_path_factory.mktemp(name)
        run_dir = directory / "run"
        # With the default eps Adam turns the rounding of a gradient that is almost 0 into a whole step.
        small = ["run.steps=3", "checkpoint.every=0", "eval.every=0", "train.optimizer.eps=1e-5", *overrides]
        with Command("train", write_small(directory), f"run.dir={run_dir}", *small, logs=directory) as command:
            assert command.finish() == 0, command.err
        found[name] = [line for line in metrics(run_dir) if "train/loss" in line]
    return found


def test_a_run_differs_by_one_line_of_config(steps: dict[str, list[dict[str, float]]]) -> None:
    wanted, found = steps["plain"], steps["streamed"]
    assert len(wanted) == len(found) == 3
    for mine, others in zip(found, wanted, strict=True):
        for metric in ("rollout/reward", "rollout/tokens", "train/tokens", "train/lr"):
            assert mine[metric] == others[metric], metric
        for metric in ("train/loss", "train/grad_norm", "train/entropy"):
            # Rounding adds up over the optimizer steps of three rollouts.
            assert mine[metric] == pytest.approx(others[metric], rel=10 * GRAD_NORM.relative, abs=1e-6), metric
