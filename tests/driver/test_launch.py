"""How a run begins and ends, whatever it starts from and dies of."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corerl.driver import launch as driver
from corerl.driver.launch import launch
from corerl.driver.progress import Progress
from corerl.errors import CheckpointDamaged, SaveFailed, WorkerDied
from corerl.observability.jsonl import read_notices
from corerl.plan.make import make_plan
from corerl.plugin.events import Notice, RunFinished, RunStarted
from corerl.plugin.observers import Observers
from tests.checkpoint.changes import flip
from tests.driver.fakes import Ears, progress, told
from tests.driver.saved import make_config
from tests.in_process import execute_here, small


def test_a_run_that_has_finished_needs_no_in_memory_checkpoint() -> None:
    done: list[str] = []

    def complete(*, wait: bool) -> None:
        done.append("complete")
        raise SaveFailed("no space left in memory")

    group = SimpleNamespace(shutdown=done.append)
    run: Any = SimpleNamespace(
        sampling=SimpleNamespace(source=SimpleNamespace(close=lambda: done.append("close"))),
        saves=SimpleNamespace(memory=SimpleNamespace(complete=complete)),
        roles={"actor": SimpleNamespace(group=group)},
        engines=None,
    )
    driver._close(run)
    assert done == ["close", "complete", "finished"]


def test_a_run_skips_checkpoints_whose_tensors_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["checkpoint.every=1", "checkpoint.keep=0", "run.steps=3", "train.schedule.steps=4"]
    execute_here(small(tmp_path, *given))
    checkpoints = tmp_path / "run/checkpoints"
    last = "actor/rank-00000.safetensors"
    second, third = (checkpoints / f"step-0000000{step}" for step in (2, 3))
    wanted = (third / last).read_bytes()
    flip(third / last, "exp_avg/model.norm.weight@0")
    flip(second / last, "master/model.norm.weight@0")

    resumed = small(tmp_path, *given, "checkpoint.resume=auto", "run.steps=4")
    hears = Ears()
    monkeypatch.setattr(driver, "load_observers", lambda *_: Observers([("hears", hears)]))
    assert execute_here(resumed).steps_done == 4
    starts = [event.first_step for event in hears.heard if isinstance(event, RunStarted)]
    assert starts == [3, 2, 1]
    lines = [event.text for event in hears.heard if isinstance(event, Notice) and "skipping" in event.text]
    why = "the run falls back to an older checkpoint"
    of_third = f"checkpoint.resume: skipping step-00000003, {why}: {third / last}: 'exp_avg' of 'model.norm.weight' is"
    of_second = f"checkpoint.resume: skipping step-00000002, {why}: {second / last}: 'master' of 'model.norm.weight' is"
    wholly = " not what was saved (its checksum differs)"  # and no advice to do what is being done
    assert lines == [f"{of_third}{wholly}", f"{of_third}{wholly}", f"{of_second}{wholly}"]  # with each restart, all
    assert hears.ends == ["restarted", "restarted", "finished"]
    assert [event.reason for event in hears.heard if isinstance(event, RunFinished)] == ["finished"]
    assert (third / last).read_bytes() == wanted  # trained again from step 1

    flip(checkpoints / "step-00000004" / last, "master/model.norm.weight@0")
    named = small(tmp_path, *given, f"checkpoint.resume={checkpoints}/step-00000004", "run.steps=5")
    with pytest.raises(CheckpointDamaged, match="'master' of 'model.norm.weight' is not what was saved"):
        execute_here(named)


def test_a_run_without_extensions_prints_and_keeps_its_notices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute_here(small(tmp_path, "extensions=[]", "run.steps=1", "backends.elsewhere.stage=1"))
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("corerl: note: ")]
    kept = [notice.text for notice in read_notices(tmp_path / "run")]
    assert printed == [f"corerl: note: {text}" for text in kept] != []


# ---- the end by a failure --------------------------------------------------------------------------------------------


def test_a_death_that_ends_the_run_comes_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(plan: object, progress: Progress, *_: Any) -> None:
        progress.steps_done = 4
        raise WorkerDied("engine-0: its process died during generate")

    monkeypatch.setattr(driver, "_assemble", dies)
    with pytest.raises(WorkerDied) as raised:
        execute_here(small(tmp_path))
    assert raised.value.__notes__ == ["the run ended in step 4"]


class Saves:
    """A checkpoint in flight, which can be rescued or not."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked = 0

    def rescue(self, *, ask: bool = True) -> None:
        self.asked += ask
        if self.error is not None:
            raise self.error


class FakeRun:
    def __init__(self, error: Exception | None = None) -> None:
        self.saves: Any = SimpleNamespace(disk=Saves(error))
        self.ears = Ears()
        self.progress = progress(self.ears, step=3)


@pytest.mark.parametrize(
    ("failure", "lost", "asked", "notices"),
    [
        (ValueError("a fault"), None, 1, []),
        (
            ValueError("a fault"),
            WorkerDied("the ranks have ended"),
            1,
            ["the checkpoint being written is lost: WorkerDied: the ranks have ended"],
        ),
        (SaveFailed("a fault"), None, 0, []),
        (KeyboardInterrupt("a fault"), None, 0, []),  # by a second signal
    ],
    ids=repr,
)
def test_a_failure_rescues_the_pending_save_and_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    lost: Exception | None,
    asked: int,
    notices: list[str],
) -> None:
    run = FakeRun(lost)
    monkeypatch.setattr(driver, "_assemble", lambda *_: run)
    config = make_config(run={"dir": str(tmp_path / "run")}, cluster={"device": "cpu"})
    with pytest.raises(type(failure), match="^a fault$"):
        with launch(functools.partial(make_plan, config)):
            raise failure
    assert (run.saves.disk.asked, told(run.ears)) == (asked, notices)
