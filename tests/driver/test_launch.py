"""How a run begins and ends, whatever it starts from and dies of."""

from __future__ import annotations

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


def test_a_run_does_not_start_from_tensors_that_have_changed(tmp_path: Path) -> None:
    given = ["checkpoint.every=1", "run.steps=1", "train.schedule.steps=4"]
    execute_here(small(tmp_path, *given))
    saved = tmp_path / "run/checkpoints/step-00000001/actor/rank-00000.safetensors"
    flip(saved, "exp_avg/model.norm.weight@0")
    found = f"{saved}: 'exp_avg' of 'model.norm.weight' is not what was saved"
    with pytest.raises(CheckpointDamaged, match=found) as raised:
        execute_here(small(tmp_path, *given, "checkpoint.resume=auto", "run.steps=2"))
    checkpoint = tmp_path / "run/checkpoints/step-00000001"
    assert raised.value.__notes__ == [f"to resume from the checkpoint before it, remove {checkpoint}"]


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
        with launch(make_plan(config)):
            raise failure
    assert (run.saves.disk.asked, told(run.ears)) == (asked, notices)
