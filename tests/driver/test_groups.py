"""What is done to a run's groups, in which order, where another plan is applied; and what is left if that fails."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, evolve, field

from corerl.calls import Future
from corerl.cluster.arrangement import Placement
from corerl.cluster.placement import Bundle, Gpu, Slot
from corerl.driver.groups import Groups
from corerl.driver.progress import Progress
from corerl.errors import (
    ConfigError,
    CorerlError,
    HookFailed,
    InsufficientResources,
    ResizeFailed,
    UserError,
    WorkerDied,
)
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plan.roles import RolePlan
from corerl.plugin.hooks import ProcessFailure
from corerl.plugin.observers import Observers
from corerl.types import InitResult, ParallelLayout
from tests.driver.fakes import Ears, Group, told
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
    arranged: list[tuple[Placement, Mapping[str, int]]] = field(factory=list)
    gone: set[int] = field(factory=set)  # bundles whose machine is
    bundles: Sequence[Bundle] = ()  # but for those of the slots
    silent: Sequence[str] = ()

    def arrange(self, placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        if self.full is not None:
            raise self.full
        self.arranged.append((placement, dict(staying)))
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

    def replace_lost(self, placement: Placement, staying: Sequence[str]) -> dict[str, Sequence[Slot]]:
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
    groups: Groups
    ears: Ears
    log: list[str]
    ranks: dict[str, Ranks]
    engines: Engines
    pool: Rooms

    def change(self, *overrides: str) -> list[str]:
        """What is told of each group, without the seconds that it took."""
        self.log.clear()
        self.groups._changed, self.groups._save = set(), self.save
        return [line.rpartition(",")[0] for line in self.groups.apply(self.groups.replan(overrides))]

    def save(self) -> Path:
        self.log.append("save")
        return Path("checkpoint")

    def fails(self, error: type[Exception], *overrides: str) -> str:
        with pytest.raises(error) as caught:
            self.change(*overrides)
        return str(caught.value)

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
    groups = Groups(plan=plan, pool=where, roles=roles_now, fleet=fleet, residency=memory, progress=now, stop=stop)
    return Case(groups, ears, log, ranks, engines, pool)


def test_a_resize_restarts_all_ranks_from_a_checkpoint(tmp_path: Path) -> None:
    case = make(tmp_path)
    assert case.groups.sizes == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    assert case.log == [
        *("save", "end actor", "end critic", "engines sleep", "take actor critic"),
        *("start actor", "start critic", "changed actor critic", "take"),
    ]
    assert case.groups._changed == {"actor", "critic"}
    ((placement, staying),) = case.pool.arranged
    assert placement.places == {"actor": (0, 1), "critic": (0,), "engines": (0, 1)}
    assert staying == {"engines": 2}
    for name, ranks in case.ranks.items():
        plan = case.groups.plan.processes.roles[name]
        assert ranks.restarted == (f"checkpoint/{name}", plan, case.pool.slots[name])
    assert case.groups.sizes == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.starts() == {"actor": 2, "critic": 1}
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["roles"]["actor"]["ranks"] == case.groups.plan.record["roles"]["actor"]["ranks"] == 2


def test_a_config_that_cannot_be_written_undoes_no_resize(tmp_path: Path) -> None:
    case = make(tmp_path)
    (tmp_path / "run/config.toml").mkdir(parents=True)
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    assert told(case.ears)[0].startswith("config.toml does not have the sizes of now: run.dir: ")
    assert case.starts() == {"actor": 2, "critic": 1}


def test_what_is_as_wanted_already_is_left_alone(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    assert case.change("roles.actor.ranks=1", "rollout.replicas=2", "backends.megatron.tensor_parallel=2") == []
    assert case.log == [] and case.state == before


# ---- where processes have ended --------------------------------------------------------------------------------------


@define(eq=False)
class Deciding:
    """An extension that notes failures, and plans again with these overrides."""

    overrides: Sequence[str] = ()
    heard: list[ProcessFailure] = field(factory=list)

    def ranks_failed(self, run: Groups, failure: ProcessFailure) -> None:
        self.heard.append(failure)
        if self.overrides:
            run.apply(run.replan(self.overrides))


def test_ranks_start_by_the_plan_of_an_extension(tmp_path: Path) -> None:
    fewer = Deciding(["roles.actor.ranks=1", "rollout.replicas=1"])
    roles = {"actor": {"ranks": 2}, "critic": {"ranks": 1}}
    case = make(tmp_path, roles=roles, extensions=[("fewer", fewer)])
    case.pool.gone = {0}
    case.groups.failed("actor rank 0 has died", ranks=True)
    lost = {"actor": 1, "critic": 1, "engines": 1}
    assert fewer.heard == [ProcessFailure(message="actor rank 0 has died", ranks=True, lost=lost)]
    assert told(case.ears) == ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]
    assert case.starts() == {"actor": 1, "critic": 1} == recorded_ranks(case)
    assert case.engines.resized_to is not None and case.engines.names == ("engine-0",)
    assert [slot.devices for slot in case.pool.slots["actor"]] == [("1",)]
    assert case.change() == []  # what has failed is over: this is between steps again


def test_a_lost_machine_without_replacement_ends_the_run(tmp_path: Path) -> None:
    silent = Deciding()
    case = make(tmp_path, extensions=[("silent", silent)])
    case.groups.failed("a rank has died", ranks=True)  # on a machine that is there
    assert [failure.lost for failure in silent.heard] == [{}] and told(case.ears) == []
    case.pool.gone = {0}
    with pytest.raises(InsufficientResources) as caught:
        case.groups.failed("a rank has died", ranks=True)
    assert caught.value.message == (
        "processes without a place: 1 of actor, 1 of critic, 1 of engines; to go on with spare machines, or in smaller "
        "groups: pip install 'corerl[elastic]'"
    )


def test_before_engines_are_replaced_ranks_whose_machine_is_gone_are_ended(tmp_path: Path) -> None:
    case = make(tmp_path, roles={"actor": {"ranks": 2}, "critic": {"ranks": 1}})
    ends: list[str] = []
    for name, ranks in case.ranks.items():
        nodes = [slot.node for slot in case.pool.slots[name]]
        ranks.processes = SimpleNamespace(nodes=nodes, kill=lambda name=name: ends.append(name))
    case.groups.failed("engine-0 has died", ranks=False)
    case.pool.gone = {1}
    with pytest.raises(WorkerDied, match="^actor rank 1: its machine is gone$"):
        case.groups.failed("engine-0 has died", ranks=False)
    assert ends == ["actor"] and case.starts() == {"actor": 2, "critic": 1}


# ---- what fails ------------------------------------------------------------------------------------------------------


def test_sizes_that_cannot_be_leave_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    assert "do not divide evenly over roles.actor.ranks=3" in case.fails(
        ConfigError, "rollout.replicas=1", "roles.actor.ranks=3"
    )
    assert case.log == [] and case.state == before


def test_a_cluster_without_room_leaves_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    case.pool.full = CorerlError("the cluster has no room")
    assert case.fails(ResizeFailed, "roles.actor.ranks=2") == "the cluster has no room"
    assert case.log == ["take"] and case.state == before


@pytest.mark.parametrize("error", [UserError("not this one"), WorkerDied("gone"), HookFailed("no memory")])
def test_if_new_ranks_fail_old_ones_restart_from_the_checkpoint(error: CorerlError, tmp_path: Path) -> None:
    case = make(tmp_path)
    plan, slots = case.groups.plan, dict(case.pool.slots)
    case.ranks["critic"].failures = [error]
    expected = error.message
    if not isinstance(error, UserError):
        expected = f"{error.message}; all groups are as before"
    kind = UserError if isinstance(error, UserError) else ResizeFailed
    assert case.fails(kind, "roles.actor.ranks=2", "rollout.replicas=1") == expected
    assert case.groups.plan is plan and case.pool.slots == slots
    assert case.engines.names == ("engine-0", "engine-1")
    assert case.log.count("save") == 1 and case.groups._changed == {"actor", "critic", "engines"}
    assert [each.restarted for each in case.ranks.values()] == [
        (f"checkpoint/{name}", plan.processes.roles[name], slots[name]) for name in case.ranks
    ]
    assert not (tmp_path / "run/config.toml").exists()
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]


def test_old_ranks_that_do_not_start_are_the_error(tmp_path: Path) -> None:
    case = make(tmp_path)
    case.ranks["actor"].failures = [WorkerDied("the new one"), WorkerDied("the old one")]
    assert case.fails(WorkerDied, "roles.actor.ranks=2") == "the old one"


def test_engines_that_do_not_start_leave_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    plan = case.groups.plan
    case.engines.failure = ResizeFailed("they do not start")
    assert case.fails(ResizeFailed, "rollout.replicas=3", "roles.actor.ranks=2") == "they do not start"
    assert case.groups.plan is plan and case.starts() == {"actor": 1, "critic": 1}
    assert [line for line in case.log if line == "start actor"] == ["start actor"] * 2


def recorded_ranks(case: Case) -> dict[str, int]:
    written = tomllib.loads((case.groups.plan.start.run_dir / "config.toml").read_text())
    return {name: written["roles"][name]["ranks"] for name in case.ranks}


# ---- how weights travel ----------------------------------------------------------------------------------------------


def on_gpus(plan: Plan, transport: str) -> Plan:
    """The plan, and those of other sizes, as if for GPUs whose senders are beside the engines."""

    def told(found: Plan) -> Plan:
        places = found.processes.placement.places
        beside = tuple(places["actor"].index(place) for place in places["engines"] if place in places["actor"])
        senders = beside if len(beside) == len(places["engines"]) else ()
        processes = evolve(found.processes, device="cuda", senders=senders, transport=transport)
        return evolve(found, processes=processes, resized=lambda overrides: told(found.resized(overrides)))

    return told(plan)


def wide(tmp_path: Path, transport: str, *, ranks: int = 4, replicas: int = 2, **given: Any) -> Case:
    roles = {"actor": {"ranks": ranks}}
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": replicas}
    tables: dict[str, Any] = {"backend": {"name": "fsdp"}, "roles": roles, "rollout": rollout}
    (tmp_path / "run").mkdir()
    plan = make_plan(config_in(tmp_path / "run", **tables))
    return make(tmp_path, plan=on_gpus(plan, transport), **given)


def test_each_engine_gets_weights_from_the_rank_on_its_device(tmp_path: Path) -> None:
    case = wide(tmp_path, "ipc")
    assert case.groups.plan.processes.senders == (0, 2)

    def arrange(placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        slots = case.pool.slots
        return {"actor": slots["actor"], "engines": [*slots["engines"], slots["actor"][1], slots["actor"][3]]}

    case.groups.pool.arrange = arrange  # type: ignore[method-assign]  # as ResourcePool does it
    case.change("rollout.replicas=4")
    assert case.groups.update_address().senders == (0, 2, 1, 3)  # those of a run that begins so: 0, 1, 2, 3


def test_engines_without_a_rank_on_their_device_are_refused(tmp_path: Path) -> None:
    case = wide(tmp_path, "ipc", replicas=1)
    before = case.state
    elsewhere = slots_of(case.groups.plan.processes.placement, moved=7)["engines"]

    def arrange(placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        return {"actor": case.pool.slots["actor"], "engines": [case.pool.slots["engines"][0], *elsewhere]}

    case.groups.pool.arrange = arrange  # type: ignore[method-assign]
    assert case.fails(ConfigError, "rollout.replicas=2") == (
        "weights.transport: 'ipc', but engines that stay would be on devices without actor ranks; choose other sizes"
    )
    assert case.log == ["take"] and case.state == before


def test_another_transport_than_the_runs_is_refused(tmp_path: Path) -> None:
    case = make(tmp_path)
    processes = case.groups.plan.processes
    case.groups.plan = evolve(case.groups.plan, processes=evolve(processes, transport="disk"))
    before = case.state
    assert case.fails(ConfigError, "roles.actor.ranks=2") == (
        "weights.transport: 'disk' while the run goes on, but these sizes need 'ipc'; set weights.transport='ipc' "
        "from the start, or choose other sizes"
    )
    assert case.log == [] and case.state == before
