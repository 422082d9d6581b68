"""The references are differences of log-probs in plain Python, and a whole run on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corerl.types import SampleBatch
from corerl_algorithms.distill import Distill, Options
from tests.end_to_end.command import numbers
from tests.in_process import execute_here, small

# A teacher of another size, whose distributions are far from uniform.
FIELDS = {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
TEACHER = {**FIELDS, **HEADS, "max_position_embeddings": 64, "tie_word_embeddings": False}


def table(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {str(value).lower()}" for name, value in fields.items()) + "}"


DISTILL = [
    "algorithm.name=distill",
    f"roles.teacher.model.config={table({**TEACHER, 'model_type': repr('qwen3')})}",
    *("rollout.samples=1", "rollout.prompts=128", "extensions=[{name='jsonl'}]"),
    *("train.optimizer.lr=0.01", "train.schedule.decay='constant'", "train.schedule.warmup_steps=0"),
]


def test_three_tokens_worked_by_hand() -> None:
    # token         student   teacher   difference   + 1/2 of the reward
    # the prompt's       0      -9
    # likelier          -2      -1/2       3/2           2
    # less likely       -1/4    -3        -11/4         -9/4
    # of a tool          0      -9
    # as likely         -1      -1          0            1/2
    batch = SampleBatch(
        tokens=np.zeros(5, dtype=np.int64),
        offsets=np.array([0, 5]),
        columns={
            "loss_mask": np.array([0, 1, 1, 0, 1], dtype=np.bool_),
            "old_logprobs": np.array([0, -2, -0.25, 0, -1], dtype=np.float32),
            "teacher_logprobs": np.array([-9, -0.5, -3, -9, -1], dtype=np.float32),
        },
    )
    rewards, nothing = np.ones(1, dtype=np.float32), np.zeros(5, dtype=np.float32)
    alone = Distill(Options()).advantages(batch, rewards, nothing)
    assert alone.advantages.dtype == np.float32
    assert alone.advantages.tolist() == [0, 1.5, -2.75, 0, 0]
    assert alone.metrics == {"teacher/reverse_kl": pytest.approx((2.75 - 1.5) / 3)}
    rewarded = Distill(Options(reward_coef=0.5)).advantages(batch, rewards, nothing)
    assert rewarded.advantages.tolist() == [0, 2, -2.25, 0, 0.5]
    assert rewarded.metrics == alone.metrics
    unanswered = batch.with_columns(loss_mask=np.zeros(5, dtype=np.bool_))
    assert Distill(Options()).advantages(unanswered, rewards, nothing).metrics == {}


def test_a_student_comes_near_its_teacher_also_after_a_resume(tmp_path: Path) -> None:
    def run(name: str, *overrides: str) -> list[dict[str, Any]]:
        config = small(tmp_path, *DISTILL, f"run.dir={tmp_path}/{name}", *overrides)
        assert execute_here(config).reason == "finished"
        return numbers(tmp_path / name)

    steps = "run.steps=24", "train.mini_batches=2"
    whole = run("whole", *steps, "checkpoint.every=20", "cluster.offload='always'")
    reverse_kl = [line["teacher/reverse_kl"] for line in whole]
    assert len(reverse_kl) == 24
    assert np.mean(reverse_kl[-4:]) < 0.75 * np.mean(reverse_kl[:4])
    assert "memory/forward_gib" in whole[-1] and "memory/train_teacher_gib" not in whole[-1]
    checkpoint = tmp_path / "whole/checkpoints/step-00000020"
    assert sorted(path.name for path in checkpoint.iterdir() if path.is_dir()) == ["actor"]

    again = run("again", *steps, f"checkpoint.resume={checkpoint}", "cluster.offload='never'")
    here = [{name: value for name, value in line.items() if not name.startswith("memory/")} for line in whole[20:]]
    assert again == here
