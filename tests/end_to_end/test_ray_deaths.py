"""A run whose own Ray dies ends with an error and keeps what it has; so does one whose directory is gone."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from corerl.checkpoint.commit import latest, read_state
from corerl.cluster.runtime import GCS_SECONDS
from tests.end_to_end.command import ENDS_WITHIN, Command, steps_done, write_small
from tests.end_to_end.faulty import fault
from tests.machine import paced

FAKE = ["rollout.engine=fake", "algorithm.on_mismatch=off", "eval.every=0"]
PLAIN = ["backend.name=plain", "roles.actor.ranks=1", *FAKE]  # the processes that start fastest
# Ray looks for GCS so long before it gives up; a test would only wait.
SHORT = 3  # seconds
SOON = f"import corerl.cluster.runtime as runtime; runtime.GCS_SECONDS = {SHORT}"


def starters_of(processes: Mapping[int, str], title: str) -> list[str]:
    """The command lines of the parents of those whose title begins so."""
    started = [pid for pid, line in processes.items() if line.startswith(title)]
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in started]
    return [processes[int(stat[1])] for stat in stats]


@pytest.mark.parametrize("service", ["gcs_server", pytest.param("raylet", marks=pytest.mark.nightly)])
def test_a_run_ends_within_a_minute_of_its_rays_death(service: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = "rollout.postprocess=tests.end_to_end.user_functions:slow"
    arguments = [write_small(tmp_path), *PLAIN, f"run.dir={run_dir}", "run.steps=10000", "checkpoint.every=1", slow]
    with Command("train", *arguments, logs=tmp_path, own_ray=True, own_forks=True, before=SOON) as run:
        run.until(lambda: steps_done(run_dir) >= 2, "in its third step")
        assert {"corerl.cluster.forks" in line for line in starters_of(run.processes(), "ray::Process")} == {True}
        part = f"/{service}"
        (pid,) = (pid for pid, line in run.processes().items() if part in line.partition(" -")[0])
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        assert run.finish(within=paced(60.0)) != 0
        assert time.monotonic() - killed < paced(60.0 - GCS_SECONDS + SHORT)
        # Ray's agents look for GCS for a minute, and hold no device.
        while left := [line for line in run.processes().values() if "agent" not in line.lower()]:
            assert time.monotonic() - killed < paced(90.0), left
            time.sleep(0.1)
    newest = latest(run_dir)
    assert newest is not None and read_state(newest)["rollout_step"] >= 1


def test_a_run_whose_directory_is_replaced_ends_with_an_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [
        write_small(tmp_path),
        f"run.dir={run_dir}",
        *FAKE,
        "run.steps=2",
        *fault("optimizer_step", "wait", step=1),
    ]
    with Command("train", *arguments, logs=tmp_path) as command:
        command.until((run_dir / "fault").exists, "in its second step")
        shutil.rmtree(run_dir)
        run_dir.mkdir()
        (run_dir / "go").touch()
        assert command.finish(within=ENDS_WITHIN) == 1
        command.assert_nothing_is_left()
    assert command.err == (
        f"corerl: error: run.dir: {run_dir} or its config.toml has been removed or moved while the run was writing "
        "there; start the run again, and leave its directory alone\n"
    )
    assert latest(run_dir) is None
