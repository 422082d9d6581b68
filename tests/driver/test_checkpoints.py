from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from corerl.calls import Future
from corerl.checkpoint import writer
from corerl.checkpoint.commit import latest, read_state
from corerl.checkpoint.writer import stage, write
from corerl.config.schema import CheckpointConfig
from corerl.driver.checkpoints import Checkpoints, DriverPart, MemoryCheckpoints
from corerl.errors import DataError, SaveFailed, WorkerDied
from corerl.plugin.events import CheckpointSaved
from corerl.types import Step
from tests.checkpoint.roles import cut, whole
from tests.driver.fakes import Ears, progress, staying


@define
class Group:
    """A role of two ranks that write where they are told; in the background only when `write` is called, or waited
    for."""

    layouts: list[str] = field(factory=lambda: ["rank 0", "rank 1"])
    broken: bool = False
    ended: bool = False
    stuck: bool = False  # in a call that never ends, while the save goes on beside it
    optimizer_step: int = 0
    nodes: list[str] = field(factory=lambda: ["", ""])  # as `elsewhere` calls this one where there is no Ray
    in_memory: bool = False  # where it is told to write
    saved_at: list[Step] = field(factory=list)
    _path: Path | None = None

    @property
    def group(self) -> Group:
        return self

    @property
    def processes(self) -> Group:
        return self

    def step(self, rollout_step: int) -> Step:
        return Step(optimizer_step=self.optimizer_step, rollout_step=rollout_step, lr=0.1)

    def save(self, path: str, step: Step, *, background: bool) -> Future[int]:
        self.saved_at.append(step)
        self._path = Path(path)
        if not background:
            self.write()
        return Future(self, lambda timeout: True, lambda: 0)

    def saved(self, *, wait: bool = False, memory: bool = False) -> Future[bool]:
        assert memory == self.in_memory
        if self.ended:
            raise WorkerDied("the ranks have ended")

        def written() -> bool:
            assert not self.stuck, "nobody comes back who waits for its answer"
            if self.broken:
                raise SaveFailed("the disk is full")
            if wait and self._path is not None:
                self.write()
            return self._path is None

        def ready(timeout: float) -> bool:
            if self.stuck and self._path is not None:
                self.write()
            return not self.stuck

        return Future(self, ready, written)

    def write(self) -> None:
        assert self._path is not None
        for rank in range(2):
            write(stage(cut(rank, 2, whole()), {}), self._path, rank)
        self._path = None


def make(run_dir: Path, heard: Ears, *, keep: int = 2, **roles: Group) -> Checkpoints:
    return Checkpoints(
        run_dir=run_dir,
        config=CheckpointConfig(every=2, keep=keep),
        roles=roles,  # type: ignore[arg-type]  # the part of a Role that saves
        residency=staying(),
        progress=progress(heard),
    )


def start(saves: Checkpoints, rollout_step: int, *, background: bool, **parts: Any) -> None:
    saves.progress.steps_done = rollout_step
    saves.start(DriverPart(state={"rollout_step": rollout_step}, **parts), background=background)


def path(run_dir: Path, step: int) -> Path:
    return run_dir / f"checkpoints/step-{step:08d}"


def test_checkpoints_are_due_at_multiples(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, Ears(), actor=Group())
    assert [step for step in range(1, 7) if checkpoints.due(step)] == [2, 4, 6]
    checkpoints.config = CheckpointConfig(every=0)
    assert not any(checkpoints.due(step) for step in range(1, 7))


def test_a_save_is_invisible_until_every_role_has_written(tmp_path: Path) -> None:
    heard, actor, critic = Ears(), Group(optimizer_step=6), Group(optimizer_step=8)
    checkpoints, stages = make(tmp_path, heard, actor=actor, critic=critic), list[str]()
    checkpoints.residency = SimpleNamespace(enter=stages.append)  # type: ignore[assignment]
    start(checkpoints, 2, background=True)
    assert (checkpoints.last_step, stages) == (2, ["save actor", "save critic"])
    checkpoints.complete(wait=False)
    actor.write()
    checkpoints.complete(wait=False)
    assert (latest(tmp_path), checkpoints.newest, heard.of(CheckpointSaved)) == (None, None, [])
    critic.write()
    checkpoints.complete(wait=False)
    assert latest(tmp_path) == path(tmp_path, 2)
    assert sorted(role.name for role in path(tmp_path, 2).iterdir() if role.is_dir()) == ["actor", "critic"]
    assert [event.step for event in heard.of(CheckpointSaved)] == [2]
    # Each at a count of its own: a critic that is warmed up has taken more steps than the actor.
    assert [step.optimizer_step for step in (*actor.saved_at, *critic.saved_at)] == [6, 8]


def test_the_next_save_waits_and_the_oldest_goes(tmp_path: Path) -> None:
    heard = Ears()
    checkpoints = make(tmp_path, heard, keep=2, actor=Group())
    for step in (2, 4, 6):
        start(checkpoints, step, background=True)
        assert [event.step for event in heard.of(CheckpointSaved)] == list(range(2, step, 2))
    checkpoints.complete(wait=True)
    assert [event.step for event in heard.of(CheckpointSaved)] == [2, 4, 6]
    assert sorted((tmp_path / "checkpoints").iterdir()) == [path(tmp_path, 4), path(tmp_path, 6)]
    checkpoints.complete(wait=True)  # nothing is pending any more
    assert len(heard.of(CheckpointSaved)) == 3


def test_a_failed_save_leaves_room_for_the_next(tmp_path: Path) -> None:
    class Refusing(Group):
        def save(self, path: str, step: Step, *, background: bool) -> Future[int]:
            raise SaveFailed("the disk is full")

    checkpoints = make(tmp_path, Ears(), actor=Group(), critic=Refusing())
    with pytest.raises(SaveFailed, match="^the disk is full$"):
        start(checkpoints, 2, background=False)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_the_driver_cannot_write_is_a_save_that_fails(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, Ears(), actor=Group())
    start(checkpoints, 2, background=False)

    def files(partial: Path) -> None:
        raise DataError("no space left")

    with pytest.raises(SaveFailed, match="^no space left$"):
        start(checkpoints, 4, write=files, background=True)
    assert checkpoints.newest == latest(tmp_path) == path(tmp_path, 2)


def test_after_a_failure_living_ranks_finish_what_they_write(tmp_path: Path) -> None:
    heard, actor = Ears(), Group()
    checkpoints = make(tmp_path, heard, actor=actor)
    start(checkpoints, 2, background=True)
    with pytest.raises(SaveFailed, match="rank-00000.safetensors is missing"):
        checkpoints.rescue(ask=False)
    checkpoints.rescue()
    assert latest(tmp_path) == path(tmp_path, 2)
    start(checkpoints, 4, background=True)
    actor.ended = True
    with pytest.raises(WorkerDied, match="^the ranks have ended$"):
        checkpoints.rescue()
    assert latest(tmp_path) == path(tmp_path, 2)
    assert [event.step for event in heard.of(CheckpointSaved)] == [2]


def test_a_rank_that_never_answers_does_not_block_a_rescue(tmp_path: Path) -> None:
    actor, critic = Group(), Group()
    checkpoints = make(tmp_path, Ears(), actor=actor, critic=critic)
    start(checkpoints, 2, background=True)
    critic.write()
    actor.stuck = True
    checkpoints.rescue()
    assert latest(tmp_path) == path(tmp_path, 2)
    actor.stuck = False
    start(checkpoints, 4, background=True)
    actor.stuck = critic.broken = True  # the one is told of though the other does not answer
    with pytest.raises(SaveFailed, match="^the disk is full$"):
        checkpoints.rescue()
    assert latest(tmp_path) == path(tmp_path, 2)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writer, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_one_in_memory_checkpoint_is_kept_until_the_run_ends(tmp_path: Path, memory: Path) -> None:
    heard, actor = Ears(), Group(in_memory=True)
    saves = make(tmp_path / "run", heard, actor=actor)
    with MemoryCheckpoints.of_run(saves) as kept:
        (directory,) = memory.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        for step in (1, 2, 3):
            start(kept, step, background=True)
        assert kept.newest == path(directory, 2)  # until the next one is complete
        actor.write()
        kept.complete(wait=False)
        assert kept.newest == path(directory, 3) and read_state(path(directory, 3)) == {"rollout_step": 3}
        assert list((directory / "checkpoints").iterdir()) == [path(directory, 3)]
    assert heard.of(CheckpointSaved) == [] and list(memory.iterdir()) == [] and saves.newest is None
    # What a killed run has left goes when its directory is used again.
    (directory / "checkpoints/step-00000003").mkdir(parents=True)
    with MemoryCheckpoints.of_run(saves):
        assert list(directory.iterdir()) == []


def test_in_memory_checkpoints_that_are_given_up_free_their_memory(tmp_path: Path, memory: Path) -> None:
    with MemoryCheckpoints.of_run(make(tmp_path / "run", Ears(), actor=Group(in_memory=True))) as kept:
        start(kept, 1, background=False)
        start(kept, 2, background=True)
        kept.give_up()
        assert kept.newest is None and list(memory.iterdir()) == []
        kept.rescue(ask=False)  # nothing is in flight


def test_in_memory_checkpoints_need_all_ranks_here(tmp_path: Path, memory: Path) -> None:
    actor, critic = Group(in_memory=True), Group(in_memory=True, nodes=["", "another"])
    with MemoryCheckpoints.of_run(make(tmp_path / "run", Ears(), actor=actor, critic=critic)) as kept:
        with pytest.raises(SaveFailed, match="^ranks are on other machines than the driver; failed ranks restart"):
            start(kept, 2, background=True)
    assert actor.saved_at == []
