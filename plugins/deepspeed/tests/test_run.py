"""`corerl train` with actor and critic on two backends, either way round: the same run; and so is a streamed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl_testing import GRAD_NORM
from tests.end_to_end.command import Command, metrics, write_small

pytestmark = pytest.mark.processes

SMALL = [
    *("run.steps=3", "checkpoint.every=0", "eval.every=0"),
    "train.optimizer.eps=1e-5",  # with the default Adam turns the rounding of a gradient near 0 into a whole step
]
PPO = ["algorithm.name=ppo", "rollout.samples=1", "rollout.prompts=16"]
RUNS = {
    "plain": ["backend.name=plain", "roles.actor.ranks=1", "roles.critic.ranks=1"],
    "an actor on fsdp, its critic on deepspeed": ["roles.critic.ranks=1", "roles.critic.backend=deepspeed"],
    "an actor on deepspeed, its critic on fsdp": [
        *("backend.name=deepspeed", "roles.critic.ranks=1", "roles.critic.backend=fsdp")
    ],
}


def steps_of(directory: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of each step of a run there."""
    run_dir = directory / "run"
    with Command("train", write_small(directory), f"run.dir={run_dir}", *SMALL, *overrides, logs=directory) as run:
        assert run.finish() == 0, run.err
        run.assert_nothing_is_left()
    return [line for line in metrics(run_dir) if "train/loss" in line]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """By run, the metrics of each step."""
    return {name: steps_of(tmp_path_factory.mktemp("run"), *PPO, *overrides) for name, overrides in RUNS.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in RUNS if name != "plain"])
def test_a_run_on_two_backends_is_the_run_on_one(steps: dict[str, list[dict[str, float]]], name: str) -> None:
    wanted, found = steps["plain"], steps[name]
    assert len(wanted) == len(found) == 3
    for mine, others in zip(found, wanted, strict=True):
        for metric in ("rollout/reward", "rollout/tokens", "train/tokens", "critic/tokens", "train/lr"):
            assert mine[metric] == others[metric], metric
        for metric in ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm"):
            # Rounding adds up over the optimizer steps of three rollouts.
            assert mine[metric] == pytest.approx(others[metric], rel=10 * GRAD_NORM.relative, abs=1e-6), metric
