"""Runs of the real command that train adapters in place of all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from corerl.checkpoint.reader import CheckpointSource
from corerl.weights.adapters import is_adapter
from corerl_testing import tolerances
from tests.end_to_end.command import Command, metrics, write_small

pytestmark = pytest.mark.timeout(600)

STEPS = 4
RUN = [
    f"run.steps={STEPS}",
    "checkpoint.every=1",
    "eval.every=0",
    "train.optimizer.lr=0.01",
    "train.schedule.decay=constant",
]
LORA = ["lora.rank=8", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"]
ALONE = ["backend.name=plain", "roles.actor.ranks=1"]
ADAPTERS = 8 * 2 * sum((32 + 32, 32 + 16, 32 + 16, 32 + 32, 3 * (32 + 64)))  # elements: rank, layers, q k v o and mlp
ROOM = 2**15  # bytes of names and shapes in a checkpoint's files


@frozen(kw_only=True)
class Trained:
    config: Path
    run_dir: Path

    def checkpoint(self, step: int) -> Path:
        return self.run_dir / f"checkpoints/step-{step:08d}"


def corerl(config: Path, run_dir: Path, *overrides: str) -> Trained:
    with Command("train", config, f"run.dir={run_dir}", *RUN, *overrides, logs=config.parent) as command:
        assert (command.finish(), command.errors) == (0, [])
        command.assert_nothing_is_left()
    return Trained(config=config, run_dir=run_dir)


def steps_of(trained: Trained) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in metrics(trained.run_dir) if "train/loss" in line}


@pytest.fixture(scope="module")
def on_fsdp(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two ranks, which nothing interrupts."""
    directory = tmp_path_factory.mktemp("lora")
    return corerl(write_small(directory), directory / "run", *LORA)


def test_a_run_of_adapters_learns_and_saves_them_alone(on_fsdp: Trained) -> None:
    steps = steps_of(on_fsdp)
    assert list(steps) == list(range(STEPS))
    for line in steps.values():
        assert line["train/grad_norm"] > 0 and abs(line["train/loss"]) < 10
        assert line["rollout/logprob_diff_max"] <= tolerances.ENGINE_LOGPROBS
    # The reference is the model: what the adapters add is zero at first.
    divergences = [steps[step]["train/kl_reference"] for step in range(STEPS)]
    assert divergences[0] < 1e-9 < 1e-6 < divergences[1] < divergences[-1]
    for step in (1, STEPS):
        actor = on_fsdp.checkpoint(step) / "actor"
        shapes = CheckpointSource(actor, "master").shapes
        assert all(map(is_adapter, shapes)) and sum(a * b for a, b in shapes.values()) == ADAPTERS
        held = sum(file.stat().st_size for file in actor.glob("*.safetensors"))
        assert 3 * 4 * ADAPTERS <= held < 3 * 4 * ADAPTERS + ROOM


def test_a_run_of_adapters_resumes_on_other_backends(on_fsdp: Trained, tmp_path: Path) -> None:
    sharded = ["backend.name=deepspeed", "backends.deepspeed.stage=3", "run.steps=3"]
    resume = f"checkpoint.resume={on_fsdp.checkpoint(2)}"
    second = corerl(on_fsdp.config, tmp_path / "sharded", *LORA, *sharded, resume)
    third = corerl(on_fsdp.config, tmp_path / "alone", *LORA, *ALONE, f"checkpoint.resume={second.checkpoint(3)}")
    wanted = steps_of(on_fsdp)
    for step, trained in ((2, second), (3, third)):
        assert list(steps_of(trained)) == [step]
        line = steps_of(trained)[step]
        assert line["rollout/reward"] == wanted[step]["rollout/reward"]
        for name, tolerance in (
            ("train/loss", tolerances.LOSS),
            ("train/grad_norm", tolerances.GRAD_NORM),
            ("train/kl_reference", tolerances.METRICS),
        ):
            near = pytest.approx(wanted[step][name], rel=tolerance.relative, abs=tolerance.absolute)
            assert (step, name, line[name]) == (step, name, near)
        assert line["rollout/logprob_diff_max"] <= tolerances.ENGINE_LOGPROBS
