"""A run whose own Ray dies says so and keeps what it has; so does one whose directory is gone."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from corerl.checkpoint.commit import latest
from tests.end_to_end.command import ENDS_WITHIN, Command, steps_done, write_small
from tests.end_to_end.faulty import fault

FAKE = ["rollout.engine=fake", "algorithm.on_mismatch=off", "eval.every=0"]
PLAIN = ["backend.name=plain", "roles.actor.ranks=1", *FAKE]  # the processes that start fastest
CONSOLE = "extensions=[{name='jsonl'},{name='console'}]"


def processes(command: Command, part: str) -> list[int]:
    """Those with this in their command line, before any option."""
    return [pid for pid, line in command.processes().items() if part in line.partition(" -")[0]]


def test_a_dead_gcs_ends_the_run_after_the_save(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    saved = ["checkpoint.every=2", *fault("save", "wait", step=2)]  # in the background, until it is let go
    with Command(
        "train", write_small(tmp_path), f"run.dir={run_dir}", *FAKE, *saved, logs=tmp_path, own_ray=True
    ) as run:
        run.until(lambda: (run_dir / "fault").exists() and steps_done(run_dir) >= 3, "saving its second step")
        assert latest(run_dir) is None
        (gcs,) = processes(run, "gcs_server")
        os.kill(gcs, signal.SIGKILL)
        (run_dir / "go").touch()
        assert run.finish(within=ENDS_WITHIN) == 1
        run.assert_nothing_is_left()
    (line,) = run.errors
    told = re.fullmatch(
        r"corerl: error: Ray's gcs_server has died; unless someone killed it, see the machine's log \(dmesg: out of "
        r"memory\?\) and its own \((.*/ray/session_\d.*/logs/gcs_server.out)\)",
        line,
    )
    assert told and Path(told[1]).stat().st_size
    assert latest(run_dir) == run_dir / "checkpoints/step-00000002"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "marks", "log"),
    [
        ("raylet", ["/raylet/raylet"], "raylet.out"),
        ("dashboard agent", ["dashboard/agent.py", "ray::DashboardAgent"], "dashboard_agent.log"),
        ("runtime-env agent", ["runtime_env/agent/main.py", "ray::RuntimeEnvAgent"], "runtime_env_agent.log"),
    ],
)
def test_a_dead_process_of_ray_is_named_with_its_log(name: str, marks: list[str], log: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [write_small(tmp_path), *PLAIN, f"run.dir={run_dir}", "run.steps=10000", "checkpoint.every=1"]
    # Where it waits for its rewards: Ray ends a driver itself that is at its object store when raylet dies, and with it
    # the save that is being written.
    reward = ["reward.name=tests.rollout.user_rewards:held", f"reward.options={{directory='{tmp_path}'}}"]
    with Command("train", *arguments, *reward, "reward.timeout=600", logs=tmp_path, own_ray=True) as run:
        run.until(lambda: steps_done(run_dir) >= 1, "in its second step")
        (tmp_path / "hold").touch()
        run.until(lambda: len(list(tmp_path.glob("held-*"))) == 2, "held by a reward in each process")
        (service,) = (process for mark in marks for process in processes(run, mark))
        os.kill(service, signal.SIGKILL)
        assert run.finish(within=ENDS_WITHIN) == 1
        run.assert_nothing_is_left()
    (line,) = run.errors
    told = re.fullmatch(
        rf"corerl: error: Ray's {name} has died; unless someone killed it, see the machine's log \(dmesg: out of "
        rf"memory\?\) and its own \((.*/ray/session_\d.*/logs/{log})\)",
        line,
    )
    assert told and Path(told[1]).exists()
    assert latest(run_dir) is not None


GCS_DIES_AT_THE_END = """
import signal
from corerl.cluster import services
from corerl.driver.run import Run
finish = Run.finish
def finish_without_gcs(self):
    summary = finish(self)
    (gcs,) = (each for each in services._watch.services if each.name == "gcs_server")
    signal.pidfd_send_signal(gcs.handle, signal.SIGKILL)
    return summary
Run.finish = finish_without_gcs
"""


def test_a_run_whose_directory_is_replaced_ends_with_an_error(
    tmp_path: Path,
) -> None:
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
