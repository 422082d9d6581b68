"""Whether ranks that have died restart, and from which checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from corerl.checkpoint.commit import begin, commit
from corerl.checkpoint.writer import stage, write
from corerl.driver.rank_recovery import RankRecovery, RestartPoint
from corerl.errors import CheckpointDamaged, CheckpointError, InsufficientResources, SaveFailed, WorkerDied
from tests.checkpoint.roles import cut, whole
from tests.driver.fakes import Ears, progress, told


@define
class Groups:
    """A run's ranks, of which the first fail to start as often as `fails` says."""

    allowed: int = 2
    ended: bool = True
    fails: int = 0
    elsewhere: bool = False
    step: int = 5
    stop: Any = field(factory=lambda: SimpleNamespace(requested=False))
    progress: Any = None
    asked: Callable[[Groups, str], object] = lambda groups, message: None
    log: list[str] = field(factory=list)

    def failed(self, message: str, *, ranks: bool) -> None:
        assert ranks
        self.asked(self, message)

    @property
    def roles(self) -> dict[str, Any]:
        processes = SimpleNamespace(ended=self.ended)
        group, train = SimpleNamespace(processes=processes), SimpleNamespace(restarts=self.allowed)
        return {"actor": SimpleNamespace(group=group, train=train)}

    def new_rendezvous(self) -> None:
        self.log.append("given up")

    def end_ranks(self) -> None:
        self.log.append("end")

    def start_ranks(self, checkpoint: Path | None) -> None:
        self.log.append(f"start from {checkpoint}")
        if self.fails:
            self.fails -= 1
            raise WorkerDied("no luck")


@define
class Saves:
    newest: Path | None = None
    in_memory: bool = False
    log: list[Any] = field(factory=list)

    def rescue(self, *, ask: bool) -> None:
        assert not ask
        raise SaveFailed("it is lost")

    def forget(self, step: int) -> None:
        self.log.append(step)


def saved(directory: Path, step: int) -> Path:
    """A complete checkpoint of one rank."""
    partial = begin(directory, step)
    write(stage(cut(0, 1, whole()), {}), partial / "actor", 0)
    return commit(partial, {"rollout_step": step, "of": directory.name}, ranks={"actor": 1})


@define
class Case:
    recovery: RankRecovery
    groups: Groups
    ears: Ears
    points: list[RestartPoint] = field(factory=list)

    def dies(self, why: str, details: str = "") -> None:
        died = WorkerDied(why)
        died.details = details
        with self.recovery.around(self.points.append) as deaths:
            raise died
        assert deaths


def make(**parts: Any) -> Case:
    """`asked` is called where extensions are asked for places."""
    saves: Any = SimpleNamespace(disk=parts.pop("checkpoints", Saves()), memory=parts.pop("memory", None))
    start, ears = parts.pop("start", SimpleNamespace(resume=None, state={})), Ears()
    trains = parts.pop("trains", True)
    groups: Any = Groups(progress=progress(ears), **parts)
    recovery = RankRecovery(groups=groups, engines=groups, start=start, saves=saves, trains=trains)
    return Case(recovery, groups, ears)


def test_restarts_without_a_new_step_are_limited() -> None:
    case = make(step=3)
    case.dies("one")
    assert case.groups.log == ["given up", "end", "start from None"]
    assert case.points == [RestartPoint(checkpoint=None, state={})]
    case.dies("two")
    gave_up = r"^three; gave up after 2 restarts without a new step \(train.restarts\)$"
    with pytest.raises(WorkerDied, match=gave_up) as caught:
        case.dies("three", "the traceback")
    assert caught.value.details == "the traceback"
    assert told(case.ears) == [
        f"{cause}; restarting all ranks from the initial weights; replaying steps 0-2" for cause in ("one", "two")
    ]
    case.recovery.step_done()  # a step that was not done before
    case.dies("four")
    case.groups.step = 2
    case.recovery.step_done()  # one that was
    case.dies("five")
    with pytest.raises(WorkerDied, match="six"):
        case.dies("six")


def test_a_run_that_only_samples_repeats_no_step() -> None:
    case = make(step=3, trains=False)
    case.dies("it")
    assert told(case.ears) == ["it; restarting all ranks from the initial weights"]


def test_where_extensions_find_no_places_the_death_is_the_error() -> None:
    def refuse(groups: Groups, message: str) -> None:
        assert message == "one"
        raise InsufficientResources("roles.actor.ranks: devices are left for 0 of 2")

    case = make(asked=refuse)
    with pytest.raises(WorkerDied) as caught:
        case.dies("one", "the traceback")
    assert caught.value.details == "the traceback"
    assert caught.value.message == (
        "one; a machine is gone, and its processes have no other places: roles.actor.ranks: devices are left for 0 of 2"
    )
    assert case.points == [] and case.groups.log == ["given up", "end"]


def test_ranks_that_die_as_they_start_are_started_once_more() -> None:
    case = make(fails=1)
    case.dies("one")
    assert case.groups.log.count("start from None") == 2 and len(case.points) == 1
    case = make(fails=9)
    with pytest.raises(WorkerDied, match="no luck"):
        case.dies("one")
    assert case.points == []


def test_ranks_restart_from_the_newest_checkpoint(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    old, newer, newest = saved(disk, 2), saved(memory, 4), saved(disk, 5)
    for checkpoint, kept, used, words, after in (
        (old, None, old, "the checkpoint after 2 steps; replaying steps 2-4", ([2], None)),
        (old, newer, newer, "the in-memory checkpoint after 4 steps; replaying step 4", ([-1], [-1])),
        (newest, newer, newest, "the checkpoint after 5 steps", ([5], [-1])),
    ):
        saves, in_memory = Saves(checkpoint), Saves(kept, in_memory=True) if kept else None
        case = make(checkpoints=saves, memory=in_memory)
        case.dies("it")
        assert [each.checkpoint for each in case.points] == [used]
        assert told(case.ears) == [f"it; restarting all ranks from {words}"]
        assert case.groups.log[2] == f"start from {used}"
        assert (saves.log, in_memory.log if in_memory else None) == after


def test_an_unreadable_checkpoint_does_not_hide_the_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(checkpoints=Saves(tmp_path / "removed"))
    with pytest.raises(CheckpointError, match="^it; ranks cannot restart: no checkpoint at .*removed"):
        case.dies("it")
    assert case.points == []
    damaged = CheckpointDamaged("a tensor is not what was saved")
    damaged.details = "the traceback"

    def start(groups: Groups, checkpoint: Path | None) -> None:
        raise damaged

    monkeypatch.setattr(Groups, "start_ranks", start)
    with pytest.raises(CheckpointDamaged, match="^it; ranks cannot restart: a tensor is not") as caught:
        make().dies("it")
    assert caught.value.details == "the traceback"


@pytest.mark.parametrize("when", ["before", "as they restart"])
def test_ranks_on_another_machine_restart_from_disk(tmp_path: Path, when: str) -> None:
    old, newer = saved(tmp_path / "disk", 2), saved(tmp_path / "memory", 4)

    def failed(groups: Groups, message: str) -> None:
        groups.elsewhere = True

    saves = Saves(old)
    kept = Saves(newer, in_memory=True)
    case = make(checkpoints=saves, memory=kept, asked=failed, elsewhere=when == "before")
    case.dies("it")
    assert [(each.checkpoint, each.step) for each in case.points] == [(old, 2)]
    assert case.groups.log[2] == f"start from {old}" and saves.log == [2]
    assert told(case.ears) == ["it; restarting all ranks from the checkpoint after 2 steps; replaying steps 2-4"]


@pytest.mark.parametrize(
    ("ended", "requested", "allowed"), [(False, False, 1), (True, True, 1), (True, False, 0)], ids=str
)
def test_nothing_restarts_if_not_allowed(ended: bool, requested: bool, allowed: int) -> None:
    case = make(ended=ended, stop=SimpleNamespace(requested=requested), allowed=allowed)
    with pytest.raises(WorkerDied, match="^an engine, perhaps$"):
        case.dies("an engine, perhaps")
    assert case.points == []
