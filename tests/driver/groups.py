"""A run's groups, all of whose parts are fakes that note what is done to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attrs import define, evolve, field

from corerl.calls import Future
from corerl.cluster.arrangement import Placement
from corerl.cluster.placement import Bundle, Gpu, Slot
from corerl.driver.groups import RunGroups
from corerl.driver.progress import Progress
from corerl.errors import CorerlError
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plan.roles import RolePlan
from corerl.plugin.observers import Observers
from corerl.types import InitResult, ParallelLayout
from tests.driver.fakes import Ears, Group
from tests.driver.saved import config_in

TABLES: dict[str, Any] = {"backend": {"name": "fsdp"}, "algorithm": {"name": "ppo"}}


@define(eq=False)
class Ranks(Group):
    """Ranks of a role; what they were last restarted with."""

    role: str
    log: list[str]
    restarted: tuple[str, RolePlan, Sequence[Slot]] | None = None
    failures: list[Exception] = field(factory=list)  # of the next restarts
    layouts: list[ParallelLayout] = field(factory=list)
    loaded_step: int = 0

    def __attrs_post_init__(self) -> None:
        self.processes: Any = SimpleNamespace(ended=False, kill=lambda: self.log.append(f"end {self.role}"))

    def shutdown(self, reason: str) -> None:
        assert reason == "resized"

    def restart(self, resume: str, plan: RolePlan, slots: Sequence[Slot]) -> Future[InitResult]:
        self.log.append(f"start {self.role}")
        self.restarted = resume, plan, slots
        self.layouts = [
            ParallelLayout.data_parallel(rank=rank, world_size=len(slots)) for rank, _ in enumerate(plan.assignments)
        ]

        def wait() -> InitResult:
            if self.failures:
                raise self.failures.pop(0)
            return InitResult(layout=self.layouts[0])

        return Future(self, lambda timeout: True, wait)


@define(eq=False)
class Engines:
    log: list[str]
    names: tuple[str, ...]
    failure: Exception | None = None
    resized_to: tuple[Sequence[Any], Sequence[Slot]] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def receivers(self) -> tuple[str, ...]:
        return self.names

    def resize(self, assignments: Sequence[Any], slots: Sequence[Slot]) -> None:
        self.log.append("resize engines")
        if self.failure is not None:
            raise self.failure
        self.names = tuple(each.context.name for each in assignments)
        self.resized_to = assignments, slots

    def reassign(self, assignments: Sequence[Any], slots: Sequence[Slot]) -> None:
        self.names = tuple(each.context.name for each in assignments)
        self.resized_to = assignments, slots


@define(eq=False, slots=False)
class Rooms(Mapping[str, Sequence[Slot]]):
    """Processes on devices by the placement's numbers; those that stay, where they are."""

    log: list[str]
    slots: dict[str, Sequence[Slot]]
    full: CorerlError | None = None
    asked: list[tuple[Placement, Mapping[str, int]]] = field(factory=list)
    gone: set[int] = field(factory=set)  # bundles whose machine is
    bundles: Sequence[Bundle] = ()  # but for those of the slots

    def arranged(self, placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        if self.full is not None:
            raise self.full
        self.asked.append((placement, dict(staying)))
        return {
            name: [*self.slots[name][: staying.get(name, 0)], *slots[staying.get(name, 0) :]]
            for name, slots in slots_of(placement).items()
        }

    def __getitem__(self, name: str) -> Sequence[Slot]:
        return self.slots[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def poll(self) -> None:
        self.log.append("look")
        if not self.gone:
            return
        for name, slots in self.slots.items():
            self.slots[name] = [
                evolve(slot, bundles=tuple(evolve(each, lost=each.index in self.gone) for each in slot.bundles))
                for slot in slots
            ]

    def refresh(self) -> None:
        """Nothing comes."""

    def used(self, groups: Iterable[str]) -> set[Bundle]:
        return {bundle for name in groups for slot in self.slots[name] for bundle in slot.bundles}

    def without_lost(self, placement: Placement, staying: Sequence[str]) -> dict[str, Sequence[Slot]]:
        found = slots_of(placement, moved=len(self.gone))
        for name in staying:
            old = self.slots[name][: len(found[name])]
            found[name] = [new if was.lost else was for was, new in zip(old, found[name], strict=True)]
        return found

    def take(self, slots: Mapping[str, Sequence[Slot]], *, give_back: bool = True) -> None:
        # Only at the end: others that come may be on what nobody is on yet.
        assert give_back == (not slots or bool(self.gone))
        self.log.append(" ".join(["take", *slots]))
        self.slots |= slots


def slots_of(placement: Placement, moved: int = 0) -> dict[str, Sequence[Slot]]:
    nowhere: Any = None
    return {
        name: [
            Slot((Bundle(nowhere, place, gpu=Gpu(at, str(at))),), 0.0, 0.0)
            for place in places
            for at in [place + moved]
        ]
        for name, places in placement.places.items()
    }


class Memory:
    """In the place of Residency."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def make_room(self) -> None:
        self.log.append("engines sleep")

    def enter(self, stage: str) -> None:
        self.log.append(f"enter {stage}")

    def ranks_changed(self, roles: Sequence[str]) -> None:
        self.log.append(f"changed {' '.join(roles)}")

    def engines_changed(self) -> None:
        self.log.append("changed engines")


@define(eq=False)
class Case:
    groups: RunGroups
    ears: Ears
    log: list[str]
    ranks: dict[str, Ranks]
    engines: Engines
    pool: Rooms

    @property
    def state(self) -> tuple[Any, ...]:
        """All that is to be as before where a change fails."""
        plan = self.groups.plan
        path = plan.start.run_dir / "config.toml"
        written = path.read_text() if path.exists() else ""
        return plan, dict(self.pool.slots), self.groups.update_address(), self.engines.names, written

    def starts(self) -> dict[str, int]:
        return {name: len(role.assignments) for name, role in self.groups.plan.processes.roles.items()}


def make(
    tmp_path: Path,
    *,
    plan: Plan | None = None,
    disaggregated: bool = False,
    extensions: Sequence[tuple[str, object]] = (),
    **tables: Any,
) -> Case:
    """A run of one actor rank, one critic rank and two engines, if nothing else is said, after its third step."""
    if plan is None:
        roles = {"actor": {"ranks": 1}, "critic": {"ranks": 1}}
        rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": 2}
        cluster = {"device": "cpu", "placement": "disaggregated" if disaggregated else "colocated"}
        (tmp_path / "run").mkdir()
        given = {**TABLES, "roles": roles, "rollout": rollout, "cluster": cluster, **tables}
        plan = make_plan(config_in(tmp_path / "run", **given))
    log: list[str] = []
    processes = plan.processes
    ranks = {
        name: Ranks(name, log, layouts=[ParallelLayout.data_parallel(rank=0, world_size=1)]) for name in processes.roles
    }
    assert processes.engine is not None
    engines = Engines(log, tuple(each.context.name for each in processes.engine.assignments))
    pool = Rooms(log, slots_of(processes.placement))
    fleet: Any = engines
    roles_now: Any = {
        name: SimpleNamespace(
            name=name, group=group, loss=None if name == "teacher" else "a loss", restarted=lambda init: None
        )
        for name, group in ranks.items()
    }
    memory: Any = Memory(log)
    ears = Ears()
    now = Progress(Observers([("ears", ears), *extensions]), 3)
    where: Any = pool
    stop: Any = SimpleNamespace(requested=False)
    groups = RunGroups(plan=plan, pool=where, roles=roles_now, fleet=fleet, residency=memory, progress=now, stop=stop)
    return Case(groups, ears, log, ranks, engines, pool)
