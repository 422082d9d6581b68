"""Move memory of ranks and engines on shared devices from one stage of a step to the next, until there is known to be
room for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from attrs import define, field

from corerl.driver.progress import Progress
from corerl.engines.fleet import EngineFleet
from corerl.kinds import ALL_KINDS, MemoryKind
from corerl.plan.processes import ProcessPlan
from corerl.plan.residency import REST, SAMPLE, TRAIN, EngineMemory, Stage, residency_stages, train_stage
from corerl.plugin.spec import ACTOR
from corerl.trainer.group import TrainGroup

GIB = 2**30
ROOM = 0.8  # of a device: what steps show to need no more than this fits, though later samples are longer
SEEN = 2  # steps of each role: the first may be skipped, before moments exist


@define(kw_only=True, eq=False)
class Residency:
    """Moves ranks and engines from stage to stage. Without stages nothing moves."""

    stages: Mapping[str, Stage] = field(factory=dict)
    groups: Mapping[str, TrainGroup] = field(factory=dict)  # by role, those in the stages
    fleet: EngineFleet | None = None
    progress: Progress
    measures: bool = False  # whether to stop moving once two steps have shown that there is room for all

    _stage: str = ""  # the last one entered
    _engines: EngineMemory = EngineMemory.NOTHING  # they sleep before ranks are built
    _ranks: dict[str, frozenset[MemoryKind]] = field(init=False)
    _peaks: dict[str, int] = field(factory=dict)  # bytes by stage, since `metrics` was last called
    _residual: int = 0  # bytes held by the fullest rank with all its kinds asleep
    _stays: bool = False  # everything is resident
    # What is measured: bytes in use by role, in the fullest stage in which it is there; how often it was measured with
    # all that it ever holds; bytes of the engines on their fullest device; bytes of the smallest device.
    _most: dict[str, int] = field(factory=dict)
    _seen: Counter[str] = field(factory=Counter)
    _engine: int = 0
    _total: int = 0

    def __attrs_post_init__(self) -> None:
        self._ranks = dict.fromkeys(self.groups, ALL_KINDS)

    @classmethod
    def of(
        cls,
        processes: ProcessPlan,
        groups: Mapping[str, TrainGroup],
        fleet: EngineFleet | None,
        progress: Progress,
        *,
        passed: Collection[str],
        measures: bool = False,
    ) -> Self:
        """Of processes that have started, whose roles `passed` run a forward pass before training."""
        colocated = {name: groups[name] for name in processes.colocated_roles}
        frozen = {name for name, group in colocated.items() if group.role_plan.objective is None}
        stages = residency_stages([*colocated], passed, frozen)
        return cls(stages=stages, groups=colocated, fleet=fleet, progress=progress, measures=measures)

    def turns(self, roles: Sequence[str]) -> dict[str, list[str]]:
        """Stage -> the roles that train in it, concurrently. Roles with devices of their own train in the first stage;
        of the others the actor goes last, since its parameters are needed next."""
        separate = [role for role in roles if role not in self.groups]
        taking = sorted((role for role in roles if role in self.groups), key=lambda role: role == ACTOR)
        if not taking:
            return {TRAIN: separate}
        first, *others = taking
        return {train_stage(first): [first, *separate], **{train_stage(role): [role] for role in others}}

    def enter(self, name: str) -> None:
        """Make exactly the stage's memory resident. What goes to sleep does so before anything wakes up."""
        if not self.stages:
            return
        stage = self.stages[name]
        if name == REST:
            self.take_turns()
        if self._stays:
            stage = Stage(engines=EngineMemory.ALL, ranks=dict.fromkeys(self.groups, ALL_KINDS))
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

    def make_room(self) -> None:
        """Let the engines sleep, where ranks that have died share their devices with others that are to load."""
        if self.stages and self._engines is not EngineMemory.NOTHING:
            self._lay_down_engines()

    def ranks_changed(self, roles: Collection[str]) -> None:
        """Note that the ranks of these roles were replaced by new ones, which are awake."""
        self._ranks |= dict.fromkeys(self.groups.keys() & set(roles), ALL_KINDS)
        self._stage = ""
        self.take_turns()

    def engines_changed(self) -> None:
        """Note that some engines were replaced by new ones, which are awake."""
        self._engines = EngineMemory.ALL
        self.take_turns()

    def take_turns(self) -> None:
        """Let ranks and engines move again, until it is measured again that there is room for all."""
        self._most, self._seen, self._engine, self._total, self._stays = {}, Counter(), 0, 0, False

    def settle(self) -> str:
        """After a step: if ranks and engines were seen to fit on their devices together, let everything stay from now
        on. Returns why, in a line; "" if nothing has changed."""
        known = self._total and self._engine and all(self._seen[role] >= SEEN for role in self.groups)
        if not self.measures or self._stays or not known:
            return ""
        # Of each role the fullest stage, so that what is there anyway counts once for each.
        needed = sum(self._most.values()) + self._engine
        if needed > ROOM * self._total:
            return ""
        self._stays = True
        return (
            f"ranks and engines stay in memory from now on: together they need {needed / GIB:.1f} of "
            f"{self._total / GIB:.1f} GiB at most (cluster.offload='always' lets them take turns)"
        )

    def metrics(self) -> dict[str, float]:
        """GiB used on the fullest device by stage, counting all its processes, and GiB held by the fullest sleeping
        rank, both since the last call."""
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
            for rank, slept in enumerate(self.groups[role].sleep(kinds).result()):
                # Torch keeps allocated memory until a sleep releases it: this is the whole stage's peak.
                if self._stage:
                    self._peaks[self._stage] = max(self._peaks.get(self._stage, 0), slept.used_bytes)
                    self._most[role] = max(self._most.get(role, 0), slept.used_bytes)
                    self._total = min(self._total or slept.total_bytes, slept.total_bytes)
                if not self._ranks[role]:
                    self._residual = max(self._residual, slept.residual_bytes)
                for note in slept.notes:
                    self.progress.notice(f"{role} rank {rank}: {note}")
            # One that is trained has its gradients and moments in no stage but that.
            self._seen[role] += self._stage == train_stage(role) or train_stage(role) not in self.stages
        if self._engines > engines:
            self._lay_down_engines()

    def _lay_down_engines(self) -> None:
        if self.fleet is not None:
            freed = self.fleet.sleep()
            if self.measures and self._stage == SAMPLE:  # their caches are there
                self._engine = max(self._engine, freed)
        self._engines = EngineMemory.NOTHING

    def _wake(self, coming: Mapping[str, frozenset[MemoryKind]], *, engines: bool) -> None:
        for role, kinds in coming.items():
            if kinds:
                self.groups[role].wake_up(kinds).result()
                self._ranks[role] |= kinds
        if engines and self.fleet is not None:
            self.fleet.wake_up()
