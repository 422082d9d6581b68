"""distillation.on_policy_distillation: what the model samples becomes likelier to a teacher."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from plugins.tinker.tests.recipes.conftest import Serving, begin
from plugins.tinker.tests.recipes.workplace import MODEL, TEACHER


def test_a_model_comes_nearer_to_its_teacher(offline: Path) -> None:
    with Serving(offline, f'serve.teachers={{"{TEACHER}"="{TEACHER}"}}') as serving:
        steps = begin(
            serving,
            "distilled",
            "distillation.on_policy_distillation",
            f"model_name={MODEL}",
            f"teacher_model={TEACHER}",
            "dataset=deepmath",
            "learning_rate=3e-4",
            "group_size=4",
            "groups_per_batch=32",
            "max_tokens=12",
            "max_steps=24",
            "eval_every=0",
            "save_every=0",
        ).finish("teacher_kl")
    apart = [step["teacher_kl"] for step in steps]
    assert mean(apart[-6:]) < 0.7 * mean(apart[:6])
