"""A run that was stopped or killed goes on as if nothing had happened: same numbers, same weights, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from corerl.checkpoint.commit import latest
from corerl.driver.run_dir import occupied
from corerl.errors import ConfigError
from tests.end_to_end.command import Command, numbers, steps_done
from tests.end_to_end.conftest import Finished
from tests.end_to_end.faulty import fault

pytestmark = pytest.mark.timeout(900)  # four runs in one test, on whatever machine

LAST = "checkpoints/step-00000006/actor"


def assert_same_as(uninterrupted: Finished, run_dir: Path) -> None:
    """Every number of every step and evaluation, every weight and moment, and the exported model."""
    assert numbers(run_dir) == numbers(uninterrupted.run_dir)
    for path in (f"{LAST}/rank-00000.safetensors", f"{LAST}/rank-00001.safetensors", "model/model.safetensors"):
        found, wanted = load_file(run_dir / path), load_file(uninterrupted.run_dir / path)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def assert_so_far_as(uninterrupted: Finished, run_dir: Path, *, steps: int) -> None:
    """Every number up to that many steps."""
    assert steps_done(run_dir) == steps
    found = numbers(run_dir)
    assert found == numbers(uninterrupted.run_dir)[: len(found)]


def kill(command: Command, run_dir: Path) -> None:
    """SIGKILL the driver: its directory is free at once, and no rank, engine or server of its stays."""
    os.kill(command.process.pid, signal.SIGKILL)
    assert command.finish() == -signal.SIGKILL
    with occupied(run_dir):
        command.assert_nothing_is_left(killed=True)


def test_a_stopped_and_killed_run_equals_the_uninterrupted_one(uninterrupted: Finished, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    fresh = ["train", uninterrupted.config, *uninterrupted.overrides, f"run.dir={run_dir}"]
    # What the run has written is itself a valid input; only the backend, which waits at a fault, is replaced.
    resumed = ["train", run_dir / "config.toml", "checkpoint.resume=auto"]

    # Ctrl-C in the third step, before its optimizer step: the step is finished and saved.
    with Command(*fresh, *fault("optimizer_step", "wait", step=2), logs=tmp_path) as command:
        command.until((run_dir / "fault").exists, "in its third step")
        command.signal_group(signal.SIGINT)
        command.until(lambda: "SIGINT" in command.out, "notified of the signal")
        (run_dir / "go").touch()
        assert (command.finish(), command.err) == (0, "")
        command.assert_nothing_is_left()
    lines = command.out.splitlines()
    assert any(line.startswith("note: SIGINT: stopping after this step, ") for line in lines)
    assert any(line.startswith("interrupted after 3 of 6 steps, ") for line in lines)
    assert latest(run_dir) == checkpoints / "step-00000003"
    assert not (run_dir / "model").exists()
    assert_so_far_as(uninterrupted, run_dir, steps=3)

    # SIGKILL while rank 1 has not written its part of the save after step 4, and step 5 was trained meanwhile.
    (run_dir / "go").unlink()
    with Command(*resumed, *fault("save", "wait", step=4), logs=tmp_path, own_ray=True) as command:
        command.until(lambda: steps_done(run_dir) >= 5, "through the step after the save began")
        partial = checkpoints / "step-00000004.partial"
        command.until((partial / "actor/rank-00000.safetensors").exists, "done with rank 0's part of the save")
        assert not (partial / "actor/rank-00001.safetensors").exists()
        processes = list(command.processes().values())  # among them two ranks and an engine
        assert sum(line.startswith("ray::Process") for line in processes) == 3
        with pytest.raises(ConfigError, match=f"^run.dir: another run is writing to {run_dir}; set another directory"):
            with occupied(run_dir):
                pass
        kill(command, run_dir)
    assert "resumed after 3 of 6 steps" in command.out.splitlines()
    assert latest(run_dir) == checkpoints / "step-00000003"

    with Command(*resumed, "backend.name=fsdp", logs=tmp_path) as command:
        assert (command.finish(), command.err) == (0, "")
    assert "resumed after 3 of 6 steps" in command.out.splitlines()
    assert not partial.exists()
    assert_same_as(uninterrupted, run_dir)
