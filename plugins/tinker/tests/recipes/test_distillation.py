"""distillation.on_policy_distillation: what the model samples becomes likelier to a teacher; and sdft, whose teacher is
the model that it began as, with the answer in its prompt: its likeliest tokens are targets."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from plugins.tinker.tests.recipes.conftest import Serving, begin
from plugins.tinker.tests.recipes.workplace import TEACHER

REVERSE_KL = "sdft/reverse_kl_mean"  # of the model from its teacher, over the teacher's five likeliest tokens


def test_a_model_comes_nearer_to_its_teacher(offline: Path) -> None:
    with Serving(offline, f'serve.teachers={{"{TEACHER}"="{TEACHER}"}}') as serving:
        steps = begin(
            serving,
            "distilled",
            f"distillation.on_policy_distillation teacher_model={TEACHER} dataset=deepmath learning_rate=3e-4 "
            "group_size=4 groups_per_batch=32 max_tokens=12 max_steps=24 eval_every=0 save_every=0",
        ).finish("teacher_kl")
    apart = [step["teacher_kl"] for step in steps]
    assert mean(apart[-6:]) < 0.7 * mean(apart[:6])


def test_a_model_learns_what_it_says_of_prompts_with_the_answer(offline: Path) -> None:
    with Serving(offline) as serving:  # of its own: the recipe does not end its session
        steps = begin(
            serving,
            "self-distilled",
            "sdft.train renderer_name=role_colon reverse=True topk=5 learning_rate=1e-3 groups_per_batch=16 "
            "max_tokens=12 max_steps=9 eval_every=0 save_every=0",
        ).finish(REVERSE_KL)
    apart = [step[REVERSE_KL] for step in steps]
    assert mean(apart[-3:]) < 0.8 * mean(apart[:3])
