"""The other modes of a run: sampling without training, training without engines, scoring; and PPO with its critic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from corerl.checkpoint.reader import CheckpointSource
from corerl.types import Array
from tests.end_to_end.command import Command, metrics, numbers, write_small

STEPS = 4
# One process a role is enough here, and the plain backend's starts fastest.
PLAIN = ["backend.name=plain", "roles.actor.ranks=1", f"run.steps={STEPS}", "eval.every=2", "checkpoint.every=0"]
PPO = ["algorithm.name=ppo", "roles.critic.ranks=1", "rollout.samples=1", "rollout.prompts=16"]


def corerl(*arguments: str | Path, logs: Path) -> str:
    """Run the command to its good end, with nothing left of it; returns what it printed."""
    with Command(*arguments, logs=logs) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
        return command.out


def weights(run_dir: Path, role: str = "actor") -> dict[str, Array]:
    source = CheckpointSource(run_dir / f"checkpoints/step-{STEPS:08d}" / role, "master")
    return {name: source.read(name, (0,) * len(shape), shape).numpy().copy() for name, shape in source.shapes.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a PPO run that kept its batches, and was scored by several samples on two sets of prompts."""
    directory = tmp_path_factory.mktemp("ppo")
    (directory / "few.jsonl").write_text('{"prompt": "35018>", "answer": "01358"}\n' * 3)
    own = 'every=4,samples=2,temperature=0.5,reward={name="exact-match"}'
    corerl(
        *("train", write_small(directory), *PLAIN, *PPO, "rollout.save=true", f"run.dir={directory}/run"),
        *("eval.samples=4", f'eval.sets=[{{source="{directory}/few.jsonl",{own}}}]'),
        logs=directory,
    )
    return directory


def test_actor_and_critic_learn_and_are_both_saved(trained: Path) -> None:
    steps = [line for line in metrics(trained / "run") if "train/loss" in line]
    assert len(steps) == STEPS
    assert all(line["critic/tokens"] == line["train/tokens"] for line in steps)
    assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]
    actor, critic = weights(trained / "run"), weights(trained / "run", "critic")
    assert critic.keys() - actor.keys() == {"value_head.weight"}
    trunk = actor.keys() & critic.keys()
    assert any(not np.array_equal(actor[name], critic[name]) for name in trunk)


def test_training_from_saved_batches_is_the_same_training(trained: Path) -> None:
    saved = f"rollout.saved={trained}/run/rollouts"
    corerl(
        *("train", trained / "small.toml", *PLAIN, *PPO, "run.mode=train-only", saved, f"run.dir={trained}/again"),
        logs=trained,
    )
    for role in ("actor", "critic"):
        wanted, found = weights(trained / "run", role), weights(trained / "again", role)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
    first, again = ([line for line in numbers(trained / each) if "train/loss" in line] for each in ("run", "again"))
    # Staleness is reported where there are engines.
    of_engines = {"rollout/staleness", "rollout/staleness_max", "rollout/staleness_fraction/0", "rollout/continued"}
    assert again == [{name: value for name, value in line.items() if name not in of_engines} for line in first]
    assert all(line["rollout/staleness"] == 0.0 for line in first)


def test_sampling_alone_samples_what_a_first_step_trains_on(trained: Path) -> None:
    out = trained / "sampled"
    corerl(*("train", trained / "small.toml", *PLAIN, *PPO, "run.mode=rollout-only", f"run.dir={out}"), logs=trained)
    assert sorted(path.name for path in (out / "rollouts").iterdir()) == [
        f"step-{step:08d}.npz" for step in range(STEPS)
    ]
    assert not (out / "checkpoints").exists()
    with (
        np.load(out / "rollouts/step-00000000.npz") as found,
        np.load(trained / "run/rollouts/step-00000000.npz") as wanted,
    ):
        assert found.files == wanted.files
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted.files)


def test_eval_scores_a_checkpoint_as_the_run_did(trained: Path) -> None:
    (last,) = [line for line in metrics(trained / "run") if line["step"] == STEPS and "eval/reward" in line]
    before = sorted(path.name for path in (trained / "run").iterdir())
    scores = json.loads(corerl("eval", trained / "run", "--json", logs=trained))
    assert scores == {name: value for name, value in last.items() if name.startswith("eval/")}
    assert {"eval/pass@4", "eval/majority@4", "eval/few/reward", "eval/few/pass@2"} <= scores.keys()
    sampled = [set(line) for line in metrics(trained / "run") if "eval/reward" in line]
    assert ["eval/few/reward" in names for names in sampled] == [True, False, True]
    assert sorted(path.name for path in (trained / "run").iterdir()) == sorted([*before, "eval"])


def test_a_teacher_of_another_size_is_never_trained(tmp_path: Path) -> None:
    model = "{model_type='qwen3',vocab_size=16,hidden_size=16,intermediate_size=32,num_hidden_layers=1,"
    model += "num_attention_heads=2,num_key_value_heads=2,head_dim=8,initializer_range=0.3,max_position_embeddings=64}"
    corerl(
        *("train", write_small(tmp_path), *PLAIN, f"run.dir={tmp_path}/run", "algorithm.name=distill"),
        *("roles.teacher.ranks=2", "roles.teacher.backend=fsdp", f"roles.teacher.model.config={model}"),
        *("roles.teacher.train.tokens_per_micro_batch=64", "cluster.offload=always", "run.steps=1", "eval.every=0"),
        logs=tmp_path,
    )
    (step,) = metrics(tmp_path / "run")
    assert {name for name in step if name.startswith("teacher/")} == {"teacher/reverse_kl"}
    assert step["teacher/reverse_kl"] > 0 and step["train/loss"] != 0
    checkpoint = tmp_path / "run/checkpoints/step-00000001"
    assert sorted(path.name for path in checkpoint.iterdir() if path.is_dir()) == ["actor"]
