"""A rank that fails ends the run with its own error, and a second signal ends it at once; no process of it stays."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from corerl.checkpoint.commit import latest
from tests.end_to_end.command import ENDS_WITHIN, Command, steps_done, write_small
from tests.end_to_end.faulty import NAME, fault

# A checkpoint after every step, complete before the next: what a failure must not cost.
SAVED = ["checkpoint.every=1", "checkpoint.background=false"]
SAVED += ["rollout.engine=fake", "algorithm.on_mismatch=off"]  # which needs no model, and its log-probs are of none

# The line that raises; what is imported here loads no backend.
SOURCE = Path(__file__).with_name("faulty_backend.py").read_text().splitlines()
(RAISES,) = (number for number, line in enumerate(SOURCE, 1) if "raise ValueError" in line)
RAYLET = re.compile(r"(\x1b\[\d+m)?\(raylet\)(\x1b\[0m)? A worker died")
WHERE = f"tests/end_to_end/faulty_backend.py:{RAISES}"


def fail(tmp_path: Path, *arguments: str) -> Command:
    """A run that the fault has ended, and that has left no process."""
    command = Command("train", write_small(tmp_path), f"run.dir={tmp_path}/run", *SAVED, *arguments, logs=tmp_path)
    with command:
        command.until((tmp_path / "run/fault").exists, "at its fault")
        assert command.finish(within=ENDS_WITHIN) == 1
        command.assert_nothing_is_left()
    # Ray may tell of a dead worker there in its own words.
    assert [line for line in command.out.splitlines() if not RAYLET.match(line)] == []
    return command


def test_a_rank_that_raises_in_train_ends_the_run(tmp_path: Path) -> None:
    command = fail(tmp_path, *fault("optimizer_step", "raise", step=1))
    assert command.err == (
        f"corerl: error: backend:{NAME}, actor rank 1: optimizer_step failed at optimizer step 2: ValueError: a "
        f"fault ({WHERE})\n"
    )
    assert steps_done(tmp_path / "run") == 1
    assert latest(tmp_path / "run") == tmp_path / "run/checkpoints/step-00000001"


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", write_small(tmp_path), f"run.dir={run_dir}", *SAVED, *fault("optimizer_step", "wait", step=1)]
    with Command(*arguments, "extensions=[{name='console'}]", logs=tmp_path) as command:
        command.until((run_dir / "fault").exists, "in the middle of its second step, which does not end")
        os.kill(command.process.pid, signal.SIGTERM)
        command.until(lambda: "SIGTERM: stopping after this step" in command.out, "notified of the first signal")
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.finish(within=ENDS_WITHIN) == 130
        command.assert_nothing_is_left()
    assert command.err == "corerl: interrupted\n" and "\ninterrupted after 1 of 6 steps, " in command.out
    assert latest(run_dir) == run_dir / "checkpoints/step-00000001"
