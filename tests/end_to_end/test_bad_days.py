"""What breaks around a run: disks, ports, other runs, rewards. One line each, and earlier results stay."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from corerl.checkpoint.commit import latest, read_state
from corerl.cli.main import main
from corerl.driver.run_dir import occupied
from corerl.rollout.recorded import read_rollout, saved_rollouts
from tests.end_to_end.command import Command, content, metrics, steps_done, write_small
from tests.end_to_end.faulty import fault
from tests.end_to_end.user_functions import kind, unreliable

FUNCTIONS = "tests.end_to_end.user_functions"
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


# ---- another run, and the end of this one ----------------------------------------------------------------------------


def test_a_killed_run_leaves_its_directory_free_and_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, config = tmp_path / "run", write_small(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that what the second run puts there goes again
    # In the background, its first checkpoint might not be there yet when it waits in its fourth step.
    endless = ["run.steps=100000", "checkpoint.background=false", f"reward.name={FUNCTIONS}:constant", CONSOLE, *FAKE]
    with Command(
        *("train", config, f"run.dir={run_dir}", *endless, *fault("optimizer_step", "wait", step=3)),
        logs=tmp_path,
        own_ray=True,
    ) as first:
        first.until((run_dir / "fault").exists, "in its fourth step")
        assert latest(run_dir) is not None
        (note,) = [line for line in first.out.splitlines() if line.startswith("note: ")]
        assert note.startswith("note: nearly all groups had equal rewards, 3 steps in a row, now ")
        before = content(run_dir)
        for own, refusal in (
            ("checkpoint.resume=auto", f"another run is writing to {run_dir}; set another directory, or wait for "),
            ("checkpoint.resume=never", f"{run_dir} already holds a run (step-00000002); continue it with "),
        ):
            assert main(["train", str(config), f"run.dir={run_dir}", "run.steps=9", *FAKE, own]) == 2
            out, err = capsys.readouterr()
            (line,) = err.splitlines()
            assert out == "" and line.startswith(f"corerl: error: run.dir: {refusal}")
        assert content(run_dir) == before

        (run_dir / "go").touch()
        first.until(lambda: steps_done(run_dir) >= 6, "two steps further")
        lines = list(first.processes().values())
        assert sum(line.startswith("ray::Process") for line in lines) == 3  # two ranks and an engine
        assert sum("multiprocessing.spawn" in line for line in lines) == 2  # of the reward
        assert any("gcs_server" in line for line in lines) and any("raylet" in line for line in lines)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.finish() == -signal.SIGKILL
        with occupied(run_dir):
            first.assert_nothing_is_left(killed=True)
    newest = latest(run_dir)
    assert newest is not None and read_state(newest)["rollout_step"] >= 2


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_samples_whose_reward_fails_are_counted_once_a_step(
    tmp_path: Path,
) -> None:
    steps, failed_value = 2, -1.0
    reward = [f"reward.name={FUNCTIONS}:unreliable", "reward.timeout=0.5", f"reward.failed_value={failed_value}"]
    run = [f"run.dir={tmp_path}/run", f"run.steps={steps}", "rollout.save=true", CONSOLE]
    with Command("train", write_small(tmp_path), *PLAIN, *run, *reward, logs=tmp_path) as command:
        assert (command.finish(), command.err) == (0, "")
        command.assert_nothing_is_left()

    rows = {line["step"]: line for line in metrics(tmp_path / "run") if "train/loss" in line}
    notes = [line for line in command.out.splitlines() if line.startswith("note: ")]
    kinds: Counter[int] = Counter()
    for step, path in enumerate(saved_rollouts(tmp_path / "run/rollouts")):
        scored = read_rollout(path)
        each = list(map(kind, scored.rollout.texts))
        wanted = [
            failed_value if of < 3 else unreliable(scored.rollout.prompts[group], text)
            for of, group, text in zip(
                each, scored.rollout.batch.row_columns["group"], scored.rollout.texts, strict=True
            )
        ]
        np.testing.assert_array_equal(scored.rewards, np.array(wanted, dtype=np.float32))
        failed = sum(of < 3 for of in each)
        assert rows[step]["rollout/failed"] == failed > 0
        assert rows[step]["rollout/reward"] == pytest.approx(np.mean(wanted))
        beginning = f"note: step {step}: {failed} samples failed; the first: reward '{FUNCTIONS}:unreliable' "
        assert sum(line.startswith(beginning) for line in notes) == 1
        kinds.update(each)
    assert len(notes) == len(rows) == steps
    assert all(kinds[of] for of in range(3))  # each kind of failure has been there
    assert latest(tmp_path / "run") == tmp_path / f"run/checkpoints/step-{steps:08d}"


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
