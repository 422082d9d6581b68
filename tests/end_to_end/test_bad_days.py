"""What breaks around a run: disks and rewards. One line each, and earlier results stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from corerl.checkpoint.commit import latest, read_state
from tests.end_to_end.command import Command, steps_done, write_small
from tests.end_to_end.faulty import fault

CONSOLE = "extensions=[{name='jsonl'},{name='console'}]"
FAKE = ["rollout.engine=fake", "algorithm.on_mismatch=off", "eval.every=0"]
PLAIN = ["backend.name=plain", "roles.actor.ranks=1", *FAKE]  # the processes that start fastest


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_run_and_keeps_complete_checkpoints(tmp_path: Path) -> None:
    run_dir, checkpoints = tmp_path / "run", tmp_path / "run/checkpoints"
    arguments = ["train", write_small(tmp_path), f"run.dir={run_dir}", *FAKE, "checkpoint.every=1", CONSOLE]
    with Command(*arguments, *fault("save", "full", step=2), logs=tmp_path) as command:
        assert command.finish() == 1, command.err
        command.assert_nothing_is_left()
    written = rf"cannot write {checkpoints}/step-00000002.partial/actor/rank-00001.safetensors: .*File too large.*"
    # How many optimizer steps it is at is said where a rank is asked to save, not where it is asked what it has saved.
    who = r"corerl: error: (actor rank 1: (save|saved)( at optimizer step \d)?: )?"
    error = rf"{who}the background save failed: {written}; complete checkpoints are untouched\n"
    assert re.fullmatch(error, command.err), command.err
    assert latest(run_dir) == checkpoints / "step-00000001"
    assert read_state(checkpoints / "step-00000001")["rollout_step"] == 1


# ---- rewards ---------------------------------------------------------------------------------------------------------

REWARDS = '''
calls = 0

def to_nan(prompt, response):
    """A number for the 32 samples of the first step, and then none."""
    global calls
    calls += 1
    return len(response) / 8 if calls <= 32 else float("nan")
'''


def test_a_nan_reward_ends_the_run_and_keeps_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)  # where the command finds the module
    changes = [*PLAIN, "reward.name=my_rewards:to_nan"]
    saved = ["checkpoint.every=1", "checkpoint.background=false", "run.dir=run", "reward.processes=1"]
    with Command("train", write_small(tmp_path), *changes, *saved, logs=tmp_path) as command:
        assert command.finish() == 2, command.err
        command.assert_nothing_is_left()
    (line,) = command.errors
    assert line.startswith("corerl: error: reward 'my_rewards:to_nan' returned nan, wanted a finite number, on prompt ")
    assert ">') with the response '" in line
    assert (command.out, steps_done(tmp_path / "run")) == ("", 1)
    assert latest(tmp_path / "run") == tmp_path / "run/checkpoints/step-00000001"
