"""What a user can get wrong: one clear line on stderr, exit status 2, and nothing of an earlier run is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from corerl.checkpoint.commit import latest
from tests.end_to_end.command import Command, content, steps_done, write_small
from tests.end_to_end.conftest import Finished

REWARDS = '''
calls = 0

def to_nan(prompt, response):
    """A number for the 16 held-out prompts and the 32 samples of the first step, and then none."""
    global calls
    calls += 1
    return len(response) / 8 if calls <= 48 else float("nan")
'''


def copy_of(uninterrupted: Finished, tmp_path: Path, *steps: int) -> Path:
    """The run directory of a finished run with some of its checkpoints, to be spoilt."""
    run_dir = tmp_path / "earlier"
    for step in steps:
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(uninterrupted.run_dir / name, run_dir / name)
    shutil.copy(uninterrupted.run_dir / "config.toml", run_dir)
    shutil.copy(uninterrupted.run_dir / "metrics.jsonl", run_dir)
    return run_dir


# ---- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "algorithm.entropy_ceof=0.3",
            "algorithm.entropy_ceof: unknown key; did you mean 'entropy_coef'? (override algorithm.entropy_ceof)",
        ),
        (
            "roles.actor.ranks=3",
            (
                "rollout.prompts: 8 x rollout.samples=4 / train.mini_batches=2 makes 16 samples per optimizer step, "
                "which do not divide evenly over roles.actor.ranks=3; use a multiple of 6, such as 12, or a number of "
                "ranks that divides 16"
            ),
        ),
        (
            "model={path='/no/model'}",
            "model.path: no directory '/no/model'; set it to a downloaded Hugging Face model directory",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_before_any_process(
    refused: Callable[..., list[str]], override: str, line: str
) -> None:
    assert refused(override) == [line]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_half_written_or_damaged_checkpoint_is_never_resumed(
    refused: Callable[..., list[str]], uninterrupted: Finished, tmp_path: Path
) -> None:
    earlier = copy_of(uninterrupted, tmp_path, 2, 4, 6)
    checkpoints = earlier / "checkpoints"
    damaged, torn = checkpoints / "step-00000004", checkpoints / "step-00000006"
    partial = (checkpoints / "step-00000002").rename(checkpoints / "step-00000002.partial")
    weights = damaged / "actor/rank-00001.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    (torn / "checkpoint.json").unlink()
    before = content(earlier)
    assert refused(f"checkpoint.resume={partial}") == [
        (
            f"checkpoint.resume: {partial} was never completed; resume from a checkpoint whose name does not end in "
            "'.partial'"
        )
    ]
    assert refused(f"checkpoint.resume={damaged}") == [
        (
            f"checkpoint.resume: {weights} has {size - 1} bytes instead of {size}; the checkpoint is damaged, so "
            "resume from another one"
        )
    ]
    assert refused(f"checkpoint.resume={torn}") == [
        (
            f"checkpoint.resume: {torn}/checkpoint.json is missing; the checkpoint is incomplete, so resume from "
            "another one"
        )
    ]
    assert content(earlier) == before


# ---- the reward function, which only a run can try -------------------------------------------------------------------


def test_a_nan_reward_ends_the_run_and_keeps_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)  # where the command finds the module
    changes = ["backend.name=plain", "roles.actor.ranks=1", "reward.name=my_rewards:to_nan"]
    changes += ["rollout.engine=fake", "algorithm.on_mismatch=off"]
    saved = ["checkpoint.every=1", "checkpoint.background=false", "run.dir=run", "reward.processes=1"]
    with Command("train", write_small(tmp_path), *changes, *saved, logs=tmp_path) as command:
        assert command.finish() == 2, command.err
        command.assert_nothing_is_left()
    (line,) = command.errors
    assert line.startswith("corerl: error: reward 'my_rewards:to_nan' returned nan, wanted a finite number, on prompt ")
    assert ">') with the response '" in line
    assert (command.out, steps_done(tmp_path / "run")) == ("", 1)
    assert latest(tmp_path / "run") == tmp_path / "run/checkpoints/step-00000001"
