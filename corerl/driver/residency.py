"""Which memory is on shared devices at each stage of a step, as data, and the moves from one stage to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

from attrs import define, field, frozen

from corerl.driver.progress import Progress
from corerl.rollout.fleet import EngineFleet
from corerl.trainer.assign import ACTOR
from corerl.trainer.group import ALL_KINDS, TrainGroup
from corerl.types import MemoryKind

GIB = 2**30

# What a save reads.
SAVED = frozenset({MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.OPTIMIZER})


class EngineMemory(IntEnum):
    """What engines hold of their devices."""

    NOTHING = 0
    WEIGHTS = 1
    ALL = 2  # caches too, which the first request takes


@frozen(kw_only=True)
class Stage:
    """Who is on the devices at one time; a role that is not named holds nothing."""

    engines: EngineMemory | None = EngineMemory.NOTHING  # None: as it is
    ranks: Mapping[str, frozenset[MemoryKind]] = field(factory=dict)  # by role


SAMPLE, FORWARD, TRAIN, UPDATE = "sample", "forward", "train", "update"
REST = "rest"  # of all, as at the start of a run: an engine that starts finds room for what it wants


def training(role: str) -> str:
    """The name of the stage in which this role takes its optimizer steps."""
    return f"train {role}"


def saving(role: str) -> str:
    """The name of the stage in which this role's part of a checkpoint is written, or copied to be."""
    return f"save {role}"


def residency_plan(roles: Sequence[str], passed: Collection[str]) -> dict[str, Stage]:
    """The stages of a step by name, for `roles` that share their devices with engines, if there are any; samples pass
    through the models of `passed` before they are trained on.

    Each stage holds what it reads and no more, so that its peak is as small as it can be: roles train, and are saved,
    one after the other, and engines have memory for weights only once all of a rank but its parameters sleeps.
    """
    if not roles:
        return {}
    return {
        FORWARD: Stage(ranks={role: frozenset({MemoryKind.PARAM}) for role in roles if role in passed}),
        TRAIN: Stage(),  # of roles with devices of their own alone
        **{training(role): Stage(ranks={role: ALL_KINDS}) for role in roles},
        UPDATE: Stage(engines=EngineMemory.WEIGHTS, ranks={ACTOR: frozenset({MemoryKind.PARAM})}),
        **{saving(role): Stage(engines=None, ranks={role: SAVED}) for role in roles},
        SAMPLE: Stage(engines=EngineMemory.ALL),
        REST: Stage(),
    }


@define(kw_only=True, eq=False)
class Residency:
    """Moves ranks and engines from stage to stage. Without a plan all of them stay where they are."""

    plan: Mapping[str, Stage] = field(factory=dict)
    groups: Mapping[str, TrainGroup] = field(factory=dict)  # of the roles in the plan
    fleet: EngineFleet | None = None
    progress: Progress

    _stage: str = ""  # the one that was entered last
    _engines: EngineMemory = EngineMemory.NOTHING  # they sleep before ranks are built
    _ranks: dict[str, frozenset[MemoryKind]] = field(init=False)
    _peaks: dict[str, int] = field(factory=dict)  # bytes, by stage, since they were taken
    _residual: int = 0  # bytes, of the rank that held most when all its kinds slept

    def __attrs_post_init__(self) -> None:
        self._ranks = dict.fromkeys(self.groups, ALL_KINDS)

    @property
    def shared(self) -> bool:
        """Whether ranks and engines take turns in the memory of devices."""
        return bool(self.plan)

    def turns(self, roles: Sequence[str]) -> dict[str, list[str]]:
        """`roles` as they train, stage by stage, those of one stage at the same time. One that is alone on its devices
        need not wait; the actor is the last of the others, since its parameters are wanted next."""
        taking = sorted((role for role in roles if role in self.groups), key=lambda role: role == ACTOR)
        turns = {training(role): [role] for role in taking} or {TRAIN: []}
        first = next(iter(turns.values()))
        first += [role for role in roles if role not in self.groups]
        return turns

    def enter(self, name: str) -> None:
        """Have the memory that the stage reads, and no other: whoever goes to sleep goes first."""
        if not self.plan:
            return
        stage = self.plan[name]
        engines = self._engines if stage.engines is None else stage.engines
        leaving = {role: held - stage.ranks.get(role, frozenset()) for role, held in self._ranks.items()}
        coming = {role: stage.ranks.get(role, frozenset()) - held for role, held in self._ranks.items()}
        if self._engines > engines or any(leaving.values()):
            with self.progress.phase("sleep"):
                self._lay_down(leaving, engines)
        waking = engines is not EngineMemory.NOTHING and self._engines is EngineMemory.NOTHING
        if waking or any(coming.values()):
            with self.progress.phase("wake_up"):
                self._wake(coming, engines=waking)
        self._engines, self._stage = engines, name

    def engines_changed(self) -> None:
        """New ones stand in the place of some, awake."""
        self._engines = EngineMemory.ALL

    def metrics(self) -> dict[str, float]:
        """GiB of the fullest device by stage, of all processes on it, and what its fullest rank held asleep; since they
        were asked for last."""
        found = {f"memory/{name.replace(' ', '_')}_gib": peak / GIB for name, peak in self._peaks.items()}
        if self._residual:
            found["memory/asleep_gib"] = self._residual / GIB
        self._peaks, self._residual = {}, 0
        return found

    def _lay_down(self, leaving: Mapping[str, frozenset[MemoryKind]], engines: EngineMemory) -> None:
        for role, kinds in leaving.items():
            if not kinds:
                continue
            self._ranks[role] -= kinds
            for rank, slept in enumerate(self.groups[role].sleep(kinds)):
                # Torch keeps what it has taken until a sleep gives it back: this is the most of the whole stage.
                if self._stage:
                    self._peaks[self._stage] = max(self._peaks.get(self._stage, 0), slept.used_bytes)
                if not self._ranks[role]:
                    self._residual = max(self._residual, slept.residual_bytes)
                for note in slept.notes:
                    self.progress.notice(f"{role} rank {rank}: {note}")
        if self._engines > engines and self.fleet is not None:
            self.fleet.sleep()
            self._engines = EngineMemory.NOTHING

    def _wake(self, coming: Mapping[str, frozenset[MemoryKind]], *, engines: bool) -> None:
        for role, kinds in coming.items():
            if kinds:
                self.groups[role].wake_up(kinds)
                self._ranks[role] |= kinds
        if engines and self.fleet is not None:
            self.fleet.wake_up()
