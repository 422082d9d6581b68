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
from corerl.driver.control import Control
from corerl.driver.groups import Groups
from corerl.driver.progress import Progress
from corerl.driver.updates import WeightUpdates
from corerl.errors import ConfigError, CorerlError, NoPlaces, ResizeFailed, SaveFailed, UserError, WorkerDied
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plan.processes import ProcessPlan
from corerl.plan.roles import RolePlan
from corerl.plugin.hookspecs import Failure
from corerl.plugin.observers import Observers
from corerl.plugin.spec import hookimpl
from corerl.types import InitResult, ParallelLayout, Step
from corerl.weights.transport import Address
from tests.driver.fakes import Ears, Group, make_updates, told
from tests.driver.saved import config_in, make_config

TABLES: dict[str, Any] = {"backend": {"name": "fsdp"}, "algorithm": {"name": "ppo"}}


@define(eq=False)
class Ranks(Group):
    """Ranks of a role; the plan and slots that they were last moved to."""

    role: str
    log: list[str]
    moved_to: tuple[RolePlan, Sequence[Slot], Step] | None = None
    failure: Exception | None = None
    layouts: list[ParallelLayout] = field(factory=list)

    def move(self, plan: RolePlan, slots: Sequence[Slot], step: Step) -> InitResult:
        self.log.append(f"move {self.role}")
        if self.failure is not None:
            raise self.failure
        self.moved_to = plan, slots, step
        self.layouts = [
            ParallelLayout.data_parallel(rank=rank, world_size=len(slots)) for rank, _ in enumerate(plan.assignments)
        ]
        return InitResult(layout=self.layouts[0])

    def manifest(self) -> Future[Any]:
        return Future(self, lambda timeout: True, lambda: f"manifest of {len(self.layouts)} ranks")

    def meeting(self, address: Address) -> Address:
        return evolve(address, token=f"met by {len(self.layouts)} ranks")


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

    def look(self) -> None:
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
    """In the place of Residency; some roles share devices with the engines."""

    def __init__(self, log: list[str], groups: Sequence[str] = ()) -> None:
        self.log, self.groups = log, groups

    def take_turns(self) -> None:
        self.log.append("turns")

    def enter(self, stage: str) -> None:
        self.log.append(f"enter {stage}")

    def ranks_changed(self, roles: Sequence[str]) -> None:
        self.log.append(f"changed {' '.join(roles)}")

    def engines_changed(self) -> None:
        self.log.append("changed engines")


@define
class Saves:
    log: list[str]
    failure: Exception | None = None
    told: bool = True

    def complete(self, *, wait: bool) -> None:
        self.log.append(f"complete {wait}")
        if self.failure is not None:
            raise self.failure

    def forget(self) -> None:
        self.log.append("forget")


@define(eq=False)
class Case:
    control: Control
    ears: Ears
    log: list[str]
    ranks: dict[str, Ranks]
    engines: Engines
    room: Rooms
    saves: Saves
    updates: WeightUpdates

    def change(self, *overrides: str) -> list[str]:
        """What is told of each group, without the seconds that it took."""
        self.log.clear()
        return [line.rpartition(",")[0] for line in self.control.apply(self.control.replan(overrides))]

    def fails(self, error: type[Exception], *overrides: str) -> str:
        with pytest.raises(error) as caught:
            self.change(*overrides)
        return str(caught.value)

    @property
    def groups(self) -> Groups:
        return self.control.groups

    @property
    def state(self) -> tuple[Any, ...]:
        """All that is to be as before where a change fails."""
        plan, updates = self.groups.plan, self.updates
        path = plan.start.run_dir / "config.toml"
        written = path.read_text() if path.exists() else ""
        return plan, dict(self.room.slots), updates.manifest, updates.address, self.engines.names, written

    def starts(self) -> dict[str, int]:
        return {name: len(role.assignments) for name, role in self.groups.plan.processes.roles.items()}


def make(
    tmp_path: Path,
    *,
    shared: Sequence[str] = (),
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
    room, saves = Rooms(log, slots_of(processes.placement)), Saves(log)
    fleet: Any = engines
    updates = make_updates(
        make_config(), ranks["actor"], fleet, manifest="of the start", address=address(processes, [])
    )

    def step_of(name: str) -> Any:
        return lambda done: f"step {done} of the {name}"

    roles_now: Any = {
        name: SimpleNamespace(name=name, group=group, loss=None if name == "teacher" else "a loss", step=step_of(name))
        for name, group in ranks.items()
    }
    memory: Any = Memory(log, shared)
    ears = Ears()
    now = Progress(Observers([("ears", ears), *extensions]), 3)
    where: Any = room
    writes: Any = [saves]
    groups = Groups(
        plan=plan,
        room=where,
        roles=roles_now,
        updates=updates,
        saves=writes,
        residency=memory,
        progress=now,
        address_of=address,
    )
    stop: Any = SimpleNamespace(requested=False)
    return Case(Control(groups=groups, progress=now, stop=stop), ears, log, ranks, engines, room, saves, updates)


def address(processes: ProcessPlan, receivers: Sequence[str]) -> Address:
    return Address(transport=processes.transport, engines=tuple(receivers), path="", senders=processes.senders)


def test_ranks_that_are_to_be_others_are_moved_and_all_else_stays(tmp_path: Path) -> None:
    case = make(tmp_path)
    assert case.control.sizes == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    assert case.log == ["complete True", "turns", "enter rest", "move actor", "changed actor", "take actor", "take"]
    ((placement, staying),) = case.room.arranged
    assert placement.places == {"actor": (0, 1), "critic": (0,), "engines": (0, 1)}
    assert staying == {"critic": 1, "engines": 2}
    moved = case.ranks["actor"].moved_to
    assert moved is not None
    assert (moved[0], moved[2]) == (case.groups.plan.processes.roles["actor"], "step 3 of the actor")
    assert list(moved[1]) == list(case.room.slots["actor"]) and len(moved[1]) == 2
    assert case.control.sizes == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.starts() == {"actor": 2, "critic": 1}
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["roles"]["actor"]["ranks"] == case.groups.plan.record["roles"]["actor"]["ranks"] == 2


def test_what_is_as_wanted_already_is_left_alone(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    assert case.change("roles.actor.ranks=1", "rollout.replicas=2", "backends.megatron.tensor_parallel=2") == []
    assert case.log == [] and case.state == before


def test_updates_get_the_manifest_of_the_new_ranks_and_meet_at_them(tmp_path: Path) -> None:
    case = make(tmp_path)
    case.change("roles.critic.ranks=2")
    assert case.updates.manifest == "of the start"  # nobody of those who send or receive has changed
    case.change("roles.actor.ranks=2")
    assert case.updates.manifest == "manifest of 2 ranks"
    assert case.updates.address == evolve(
        address(case.groups.plan.processes, case.engines.names), token="met by 2 ranks"
    )
    case.change("rollout.replicas=3")
    assert case.updates.address.engines == case.engines.names == ("engine-0", "engine-1", "engine-2")
    assert len(case.updates.address.senders) == 3


def test_engines_get_the_devices_of_their_slots(tmp_path: Path) -> None:
    case = make(tmp_path, disaggregated=True)
    case.room.slots = slots_of(case.groups.plan.processes.placement, moved=4)
    assert case.change("rollout.replicas=3") == ["engines: 2 -> 3"]
    assert case.log == ["complete True", "enter rest", "resize engines", "take engines", "changed engines", "take"]
    assert case.room.arranged[0][1] == {"actor": 1, "critic": 1, "engines": 2}
    resized = case.engines.resized_to
    assert resized is not None
    assert [each.context.devices for each in resized[0]] == [("5",), ("6",), ("3",)]  # the third one's is a newcomer's
    assert [slot.devices for slot in resized[1]] == [("5",), ("6",), ("3",)]


def test_a_role_that_shares_devices_is_awake_as_it_is_moved_and_nothing_else(tmp_path: Path) -> None:
    case = make(tmp_path, shared=["actor", "critic"])
    case.change("roles.actor.ranks=2", "roles.critic.ranks=2")
    assert [line for line in case.log if line.split()[0] in ("turns", "enter", "move")] == [
        *("turns", "enter train actor", "move actor"),
        *("turns", "enter train critic", "move critic"),
    ]


def test_a_frozen_role_is_moved_asleep(tmp_path: Path) -> None:
    roles = {"actor": {"ranks": 1}, "teacher": {"ranks": 1}}
    case = make(tmp_path, shared=["actor", "teacher"], algorithm={"name": "distill"}, roles=roles)
    case.change("roles.teacher.ranks=2")
    assert [line for line in case.log if line.split()[0] in ("enter", "move")] == ["enter rest", "move teacher"]


def test_the_checkpoint_that_a_run_began_with_is_no_reason_to_move(tmp_path: Path) -> None:
    case = make(tmp_path)
    processes = case.groups.plan.processes
    resumed = {
        name: evolve(
            role,
            assignments=tuple(evolve(each, config=evolve(each.config, resume="a part")) for each in role.assignments),
        )
        for name, role in processes.roles.items()
    }
    case.groups.plan = evolve(case.groups.plan, processes=evolve(processes, roles=resumed))
    case.change("roles.critic.ranks=2")
    assert [line for line in case.log if line.startswith("move")] == ["move critic"]


def test_another_backend_or_layout_moves_the_roles_that_have_it(tmp_path: Path) -> None:
    case = make(tmp_path)
    lines = case.change("roles.critic.backend=deepspeed")
    assert lines == ["critic: 1 rank of fsdp (dp 1) -> 1 rank of deepspeed (dp 1)"]
    lines = case.change("backends.fsdp.reshard_after_forward=false")
    assert lines == ["actor: 1 rank of fsdp (dp 1) -> 1 rank of fsdp (dp 1)"]


# ---- where processes have ended --------------------------------------------------------------------------------------


@define(eq=False)
class Deciding:
    """An extension that notes failures, and plans again with these overrides."""

    overrides: Sequence[str] = ()
    heard: list[Failure] = field(factory=list)

    @hookimpl
    def ranks_failed(self, run: Control, failure: Failure) -> None:
        self.heard.append(failure)
        if self.overrides:
            run.apply(run.replan(self.overrides))


def test_ranks_start_by_the_plan_that_an_extension_has_made_for_what_is_left(tmp_path: Path) -> None:
    fewer = Deciding(["roles.actor.ranks=1", "rollout.replicas=1"])
    roles = {"actor": {"ranks": 2}, "critic": {"ranks": 1}}
    case = make(tmp_path, roles=roles, extensions=[("fewer", fewer)])
    case.room.gone = {0}
    case.control.failed("actor rank 0 has died", ranks=True)
    lost = {"actor": 1, "critic": 1, "engines": 1}
    assert fewer.heard == [Failure(message="actor rank 0 has died", ranks=True, lost=lost)]
    assert told(case.ears) == ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]
    assert case.starts() == {"actor": 1, "critic": 1} == recorded_ranks(case)
    assert case.engines.resized_to is not None and case.engines.names == ("engine-0",)
    assert [slot.devices for slot in case.room.slots["actor"]] == [("1",)]
    assert case.control.apply(case.control.plan) == []  # what has failed is over: this is between steps again


def test_processes_whose_machine_is_gone_end_the_run_where_nobody_has_places_for_them(tmp_path: Path) -> None:
    silent = Deciding()
    case = make(tmp_path, extensions=[("silent", silent)])
    case.control.failed("a rank has died", ranks=True)  # on a machine that is there
    assert [failure.lost for failure in silent.heard] == [{}] and told(case.ears) == []
    case.room.gone = {0}
    with pytest.raises(NoPlaces) as caught:
        case.control.failed("a rank has died", ranks=True)
    assert caught.value.message == (
        "processes without a place: 1 of actor, 1 of critic, 1 of engines; to go on with spare machines, or in smaller "
        "groups: pip install 'corerl[elastic]'"
    )


def test_before_engines_are_replaced_ranks_whose_machine_is_gone_are_ended(tmp_path: Path) -> None:
    case = make(tmp_path, roles={"actor": {"ranks": 2}, "critic": {"ranks": 1}})
    ends: list[str] = []
    for name, ranks in case.ranks.items():
        nodes = [slot.node for slot in case.room.slots[name]]
        ranks.processes = SimpleNamespace(nodes=nodes, kill=lambda name=name: ends.append(name))  # type: ignore[attr-defined]
    case.control.failed("engine-0 has died", ranks=False)
    case.room.gone = {1}
    with pytest.raises(WorkerDied, match="^actor rank 1: its machine is gone$"):
        case.control.failed("engine-0 has died", ranks=False)
    assert ends == ["actor"] and case.starts() == {"actor": 2, "critic": 1}


# ---- what fails ------------------------------------------------------------------------------------------------------


def test_sizes_that_cannot_be_leave_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    assert "do not divide evenly over roles.actor.ranks=3" in case.fails(
        ConfigError, "rollout.replicas=1", "roles.actor.ranks=3"
    )
    assert case.log == [] and case.state == before


def test_a_save_in_flight_that_fails_is_an_error_before_any_rank_is_moved(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    case.saves.failure = SaveFailed("the disk is full")
    assert case.fails(SaveFailed, "roles.actor.ranks=2") == "the disk is full"
    assert case.log == ["complete True", "take"] and case.state == before


def test_a_copy_in_memory_that_fails_is_lost_and_the_ranks_move(tmp_path: Path) -> None:
    case = make(tmp_path)
    case.saves.failure, case.saves.told = SaveFailed("no memory"), False
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    assert case.log[:2] == ["complete True", "forget"]
    assert told(case.ears)[0] == "a copy in memory is lost: no memory"


def test_a_cluster_without_room_leaves_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    case.room.full = CorerlError("the cluster has no room")
    assert case.fails(ResizeFailed, "roles.actor.ranks=2") == "the cluster has no room"
    assert case.log == ["take"] and case.state == before


@pytest.mark.parametrize("error", [ResizeFailed("no luck"), UserError("not this one"), WorkerDied("gone")])
def test_ranks_that_cannot_be_moved_leave_all_as_it_was_and_what_was_reserved_is_given_back(
    error: CorerlError, tmp_path: Path
) -> None:
    case = make(tmp_path)
    before = case.state
    case.ranks["actor"].failure = error
    assert case.fails(type(error), "roles.actor.ranks=2") == error.message
    assert case.log == ["complete True", "turns", "enter rest", "move actor", "take"]  # nothing: to give the rest back
    assert case.state == before
    case.ranks["actor"].failure = None
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]


def test_engines_that_cannot_be_resized_leave_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    case.engines.failure = ResizeFailed("they do not start")
    assert case.fails(ResizeFailed, "rollout.replicas=3") == "they do not start"
    assert case.log == ["complete True", "enter rest", "resize engines", "take"] and case.state == before


def recorded_ranks(case: Case) -> dict[str, int]:
    written = tomllib.loads((case.groups.plan.start.run_dir / "config.toml").read_text())
    return {name: written["roles"][name]["ranks"] for name in case.ranks}


@pytest.mark.parametrize("error", [ResizeFailed, UserError])
def test_of_roles_that_one_setting_moves_those_that_have_moved_go_back_where_another_cannot(
    tmp_path: Path, error: type[CorerlError]
) -> None:
    case = make(tmp_path)
    both = "backends.fsdp.reshard_after_forward=false"
    case.ranks["critic"].failure = error("no luck")
    before = case.groups.plan
    assert case.fails(error, both) == "no luck"
    assert case.groups.plan.processes.roles == before.processes.roles
    assert [line for line in case.log if line.startswith("move")] == ["move actor", "move critic", "move actor"]
    case.log.clear()
    case.change("rollout.replicas=2")  # which is nothing of these roles
    assert [line for line in case.log if line.startswith("move")] == []
    case.ranks["critic"].failure = None
    case.change(both)
    assert [line for line in case.log if line.startswith("move")] == ["move actor", "move critic"]


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


def test_each_engine_is_sent_to_by_the_rank_on_its_device_wherever_it_stays(tmp_path: Path) -> None:
    case = wide(tmp_path, "ipc")
    assert case.groups.plan.processes.senders == (0, 2)

    def arrange(placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        slots = case.room.slots
        return {"actor": slots["actor"], "engines": [*slots["engines"], slots["actor"][1], slots["actor"][3]]}

    case.groups.room.arrange = arrange  # type: ignore[method-assign]  # as ResourcePool does it
    case.change("rollout.replicas=4")
    assert case.updates.address.senders == (0, 2, 1, 3)  # those of a run that begins so: 0, 1, 2, 3


def test_engines_that_would_have_no_rank_beside_them_are_refused_if_they_need_one(tmp_path: Path) -> None:
    case = wide(tmp_path, "ipc", replicas=1)
    before = case.state
    elsewhere = slots_of(case.groups.plan.processes.placement, moved=7)["engines"]

    def arrange(placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        return {"actor": case.room.slots["actor"], "engines": [case.room.slots["engines"][0], *elsewhere]}

    case.groups.room.arrange = arrange  # type: ignore[method-assign]
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
