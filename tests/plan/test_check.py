"""Contradictions between settings: what a row of `test_refused` cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.config.load import config_of
from corerl.plan.check import contradictions, uneven
from tests.driver.saved import DATA


def lines(*overrides: str) -> list[str]:
    return contradictions(config_of(DATA, overrides))


def test_a_name_of_the_hub_is_answered_with_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen3-0.6B"
    (line,) = lines("model.config={}", f"model.path={name}")
    assert line.endswith(f"Hub: hf download {name} --local-dir {name}")
    (line,) = lines("model.config={}", "model.path=models/Qwen3-0.6B")  # where the examples have theirs
    assert line.endswith("set it to a downloaded Hugging Face model directory")
    (tmp_path / "Qwen" / "Qwen3-06B").mkdir(parents=True)
    (line,) = lines("model.config={}", f"model.path={name}")
    assert line.endswith("; did you mean 'Qwen/Qwen3-06B'?")


@pytest.mark.parametrize(
    ("prompts", "samples", "mini_batches", "ranks", "groups", "unit", "words"),
    [
        # 5 prompts x 3 samples = 15 rows a step over 2 ranks: 6 x 3 would do, so prompts in steps of 2
        (5, 3, 1, 2, 2, "2, such as 6", "a number of ranks that divides 15"),
        # 6 x 4 / 2 = 12 rows over 8 ranks: a step needs an even number of prompts, so a batch a multiple of 4
        (6, 4, 2, 8, 8, "4, such as 8", "a number of ranks that divides 12"),
        (6, 4, 2, 16, 8, "4, such as 8", "the number of groups divides 12"),
        (6, 4, 2, 8, 4, "", ""),
    ],
)
def test_samples_that_do_not_divide_are_answered_with_a_multiple(
    prompts: int, samples: int, mini_batches: int, ranks: int, groups: int, unit: str, words: str
) -> None:
    def of(count: int) -> str:
        sizes = {"rollout.prompts": count, "rollout.samples": samples, "roles.actor.ranks": ranks}
        given = [f"{name}={value}" for name, value in {**sizes, "train.mini_batches": mini_batches}.items()]
        return "".join(uneven(config_of(DATA, given), {"actor": groups}))

    line = of(prompts)
    assert bool(line) == bool(unit)
    if unit:
        assert f"use a multiple of {unit}, or" in line and line.endswith(words)
        assert of(int(unit.split()[-1])) == ""


def test_a_batch_that_does_not_divide_is_answered_for_all_roles() -> None:
    critic = ["algorithm.name=ppo", "rollout.samples=1", "roles.actor.ranks=2", "roles.critic.ranks=3"]
    for each in uneven(config_of(DATA, [*critic, "rollout.prompts=7"]), {"actor": 2, "critic": 3}):
        assert "use a multiple of 6, such as 12, or" in each
    assert [*uneven(config_of(DATA, [*critic, "rollout.prompts=12"]), {"actor": 2, "critic": 3})] == []
    parts = ["algorithm.name=ppo", "train.mini_batches=2", "roles.critic.train.mini_batches=3"]
    assert [line.rpartition("; ")[2] for line in lines(*parts, "rollout.prompts=7")] == [
        "use a multiple of 6, such as 12"
    ] * 2


def test_a_model_of_a_role_that_the_run_has_not_is_not_looked_at() -> None:
    critic = ["model.pictures=vision", "roles.critic.model.path=/nowhere", "roles.critic.model.tower=trained"]
    assert [line for line in lines(*critic) if line.startswith("roles.critic.model.path")] != []
    assert [line for line in lines("run.mode=rollout-only", *critic) if "critic" in line] == []
