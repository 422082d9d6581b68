"""A run of the real command that trains adapters in place of all weights, on two ranks."""

from __future__ import annotations

from pathlib import Path

from corerl.checkpoint.reader import CheckpointSource
from corerl.weights.adapters import is_adapter
from corerl_testing import tolerances
from tests.end_to_end.command import Command, metrics, write_small

STEPS = 4
RUN = [
    *(f"run.steps={STEPS}", "checkpoint.every=1", "eval.every=0", "train.optimizer.lr=0.01"),
    *("train.schedule.decay=constant", "lora.rank=8", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"),
]
ADAPTERS = 8 * 2 * sum((32 + 32, 32 + 16, 32 + 16, 32 + 32, 3 * (32 + 64)))  # elements: rank, layers, q k v o and mlp
ROOM = 2**15  # bytes of names and shapes in a checkpoint's files


def test_a_run_of_adapters_learns_and_saves_them_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Command("train", write_small(tmp_path), f"run.dir={run_dir}", *RUN, logs=tmp_path) as command:
        assert (command.finish(), command.errors) == (0, [])
        command.assert_nothing_is_left()
    steps = [line for line in metrics(run_dir) if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(STEPS))
    for line in steps:
        assert line["train/grad_norm"] > 0 and abs(line["train/loss"]) < 10
        assert line["rollout/logprob_diff_max"] <= tolerances.ENGINE_LOGPROBS
    # The reference is the model: what the adapters add is zero at first.
    divergences = [line["train/kl_reference"] for line in steps]
    assert divergences[0] < 1e-9 < 1e-6 < divergences[1] < divergences[-1]
    for step in (1, STEPS):
        actor = run_dir / f"checkpoints/step-{step:08d}/actor"
        shapes = CheckpointSource(actor, "master").shapes
        assert all(map(is_adapter, shapes)) and sum(a * b for a, b in shapes.values()) == ADAPTERS
        held = sum(file.stat().st_size for file in actor.glob("*.safetensors"))
        assert 3 * 4 * ADAPTERS <= held < 3 * 4 * ADAPTERS + ROOM
