"""Whether ranks that have died are started anew, and from where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from corerl.calls import Future
from corerl.checkpoint.commit import begin, commit
from corerl.checkpoint.writer import stage, write
from corerl.cluster.placement import Bundle, Slot
from corerl.driver.restarts import Point, Restarts
from corerl.errors import DataError, NoPlaces, SaveFailed, WorkerDied
from corerl.types import InitResult, ParallelLayout
from tests.checkpoint.roles import cut, whole
from tests.driver.fakes import Ears, progress, told


@define
class Role:
    """A role and its group of ranks, the first of which fail to start as often as `fails` says."""

    train: Any
    ended: bool = True
    loss: str | None = "a loss"
    fails: int = 0
    log: list[str] = field(factory=list)

    @property
    def group(self) -> Role:
        return self

    @property
    def processes(self) -> Role:
        return self

    def kill(self) -> None:
        self.log.append("kill")

    def restart(self, resume: str, plan: str, slots: Sequence[Slot]) -> Future[InitResult]:
        assert plan == "its plan" and [each.lost for each in slots] == [False]
        self.log.append(f"restart from {resume!r}")

        def wait() -> InitResult:
            if self.fails:
                self.fails -= 1
                raise WorkerDied("no luck")
            layout = ParallelLayout.data_parallel(rank=0, world_size=1)
            return InitResult(layout=layout, optimizer_step=7, weights_version=4)

        return Future(self, lambda timeout: True, wait)

    def restarted(self, init: InitResult) -> None:
        self.log.append(f"at step {init.optimizer_step}")


@define
class Saves:
    newest: Path | None = None
    log: list[Any] = field(factory=list)

    def rescue(self, *, ask: bool) -> None:
        assert not ask
        raise SaveFailed("it is lost")

    def rewound(self, step: int) -> None:
        self.log.append(step)


def saved(directory: Path, step: int) -> Path:
    """A complete checkpoint of one rank."""
    partial = begin(directory, step)
    write(stage(cut(0, 1, whole()), {}), partial / "actor", 0)
    return commit(partial, {"rollout_step": step, "of": directory.name}, ranks={"actor": 1})


@define
class Case:
    restarts: Restarts
    actor: Role
    ears: Ears
    points: list[Point] = field(factory=list)

    def dies(self, why: str) -> None:
        with self.restarts.around(self.points.append) as fine:
            raise WorkerDied(why)
        assert not fine()


def slots_on(node: str) -> list[Slot]:
    """Of one rank; "" is the driver's machine where there is no Ray."""
    group: Any = None
    return [Slot((Bundle(group, 0, node),), 1.0, 0.0)]


def control(failed: Callable[[str], object]) -> Any:
    """`failed` is called where extensions are asked for places."""
    plans, room = defaultdict(lambda: "its plan"), defaultdict(lambda: slots_on(""))

    def asked(message: str, *, ranks: bool) -> None:
        assert ranks
        failed(message)

    return SimpleNamespace(
        failed=asked,
        plan=SimpleNamespace(processes=SimpleNamespace(roles=plans)),
        groups=SimpleNamespace(room=room),
    )


def make(*, ended: bool = True, allowed: int = 2, requested: bool = False, done: int = 5, **parts: Any) -> Case:
    ears, actor = Ears(), Role(SimpleNamespace(restarts=allowed), ended=ended)
    given: dict[str, Any] = {
        "roles": {"actor": actor},
        "residency": SimpleNamespace(make_room=lambda: None, ranks_changed=lambda roles: actor.log.append("changed")),
        "checkpoints": Saves(),
        "copies": None,
        "updates": SimpleNamespace(ranks_ended=lambda: actor.log.append("given up")),
        "control": control(lambda message: None),
        "start": SimpleNamespace(resume=None, state={}),
        "progress": progress(ears, step=done),
        "stop": SimpleNamespace(requested=requested),
        **parts,
    }
    return Case(Restarts(**given), actor, ears)


def test_ranks_are_started_anew_as_often_as_the_config_says_without_a_new_step() -> None:
    case = make(done=3)
    case.dies("one")
    assert case.actor.log == ["kill", "given up", "restart from ''", "at step 7", "changed"]
    assert case.points == [Point(checkpoint=None, state={}, version=4)]
    case.dies("two")
    with pytest.raises(WorkerDied, match="three") as caught:
        case.dies("three")
    assert caught.value.__notes__ == ["the ranks had already been started anew 2 times (train.restarts)"]
    assert told(case.ears) == [
        f"{cause}; all ranks are started anew from the initial weights; steps 1 to 3 are done again"
        for cause in ("one", "two")
    ]
    case.restarts.step_done()  # a step that was not done before
    case.dies("four")
    case.restarts.progress.step = 2
    case.restarts.step_done()  # one that was
    case.dies("five")
    with pytest.raises(WorkerDied, match="six"):
        case.dies("six")


def test_extensions_are_asked_for_places_and_where_there_is_none_the_death_is_the_error_and_says_so() -> None:
    heard: list[str] = []
    case = make(control=control(heard.append))
    case.dies("one")
    assert heard == ["one"] and len(case.points) == 1

    def refuse(message: str) -> None:
        raise NoPlaces("roles.actor.ranks: devices are left for 0 of 2")

    case = make(control=control(refuse))
    with pytest.raises(WorkerDied) as caught:
        case.dies("one")
    assert caught.value.message == (
        "one; a machine is gone, and its processes have no other places: roles.actor.ranks: devices are left for 0 of 2"
    )
    assert case.points == [] and "restart from ''" not in case.actor.log


def test_ranks_that_die_as_they_start_are_started_once_more() -> None:
    case = make()
    case.actor.fails = 1
    case.dies("one")
    assert [line for line in case.actor.log if "restart" in line] == ["restart from ''"] * 2 and len(case.points) == 1
    case = make()
    case.actor.fails = 9
    with pytest.raises(WorkerDied, match="no luck"):
        case.dies("one")
    assert case.points == []


def test_they_begin_with_the_newest_of_checkpoints_and_copies(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    old, newer, newest = saved(disk, 2), saved(memory, 4), saved(disk, 5)
    teacher = Role(SimpleNamespace(restarts=0), loss=None)
    for checkpoint, copy, point, after in (
        (old, None, (old, "the checkpoint of step 2; steps 3 to 5 are done again"), ([2], None)),
        (old, newer, (newer, "the copy in memory of step 4; step 5 is done again"), ([-1], [-1])),
        (newest, newer, (newest, "the checkpoint of step 5"), ([5], [-1])),
    ):
        saves, copies = Saves(checkpoint), Saves(copy) if copy else None
        case = make(checkpoints=saves, copies=copies)
        case.restarts.roles = {"actor": case.actor, "teacher": teacher}  # type: ignore[dict-item]
        case.dies("it")
        path, words = point
        assert [each.checkpoint for each in case.points] == [path]
        assert told(case.ears) == [f"it; all ranks are started anew from {words}"]
        assert case.actor.log[2] == f"restart from '{path}/actor'"
        assert (saves.log, copies.log if copies else None) == after
    assert teacher.log[1::4][0] == "restart from ''"  # which no checkpoint has


@pytest.mark.parametrize("when", ["before", "as they are started anew"])
def test_ranks_on_another_machine_begin_with_a_checkpoint_where_a_copy_is_newer(tmp_path: Path, when: str) -> None:
    old, newer = saved(tmp_path / "disk", 2), saved(tmp_path / "memory", 4)
    saves, copies = Saves(old), Saves(newer)

    def failed(message: str) -> None:
        parts.groups.room["actor"] = slots_on("another")

    parts = control(failed)
    if when == "before":  # a resize has put them there
        failed("")
    case = make(checkpoints=saves, copies=copies, control=parts)
    case.dies("it")
    assert [(each.checkpoint, each.step) for each in case.points] == [(old, 2)]
    assert case.actor.log[2] == f"restart from '{old}/actor'" and saves.log == [2]
    assert told(case.ears)[-1] == (
        "it; all ranks are started anew from the checkpoint of step 2; steps 3 to 5 are done again"
        if when == "before"
        else "ranks are on other machines than the copy in memory; they start from the checkpoint of step 2; "
        "steps 3 to 5 are done again"
    )


def test_a_resumed_run_without_a_checkpoint_of_its_own_goes_back_to_where_it_began(tmp_path: Path) -> None:
    begun = saved(tmp_path, 3)
    state = {"rollout_step": 3, "as": "the run has read it"}
    case = make(start=SimpleNamespace(resume=begun, state=state), checkpoints=Saves(begun), done=4)
    case.dies("it")
    assert case.points == [Point(checkpoint=begun, state=state, version=4)]
    assert told(case.ears) == ["it; all ranks are started anew from the checkpoint of step 3; step 4 is done again"]


@pytest.mark.parametrize(
    ("ended", "requested", "allowed"), [(False, False, 1), (True, True, 1), (True, False, 0)], ids=str
)
def test_nothing_is_started_anew_where_no_rank_has_ended_or_the_user_stops_or_wants_none(
    ended: bool, requested: bool, allowed: int
) -> None:
    case = make(ended=ended, requested=requested, allowed=allowed)
    with pytest.raises(WorkerDied) as caught:
        case.dies("an engine, perhaps")
    assert case.points == [] and not hasattr(caught.value, "__notes__")


def test_other_errors_leave_as_they_are_and_a_block_that_ends_well_is_fine() -> None:
    case = make()
    with pytest.raises(DataError), case.restarts.around(case.points.append):
        raise DataError("of the user's")
    with case.restarts.around(case.points.append) as fine:
        pass
    assert fine() and case.points == []
