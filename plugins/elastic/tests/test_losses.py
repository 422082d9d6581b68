"""What is done to a run's groups, in which order, where other sizes are wanted; and what is left if that fails."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, evolve, field

from corerl.calls import Future
from corerl.cluster import placement as of_cluster
from corerl.cluster.arrangement import Placement
from corerl.cluster.placement import Bundle, Gpu, Slot
from corerl.driver.scaling import Devices
from corerl.driver.sizes import Sizes
from corerl.driver.updates import WeightUpdates
from corerl.errors import ConfigError, CorerlError, NoPlaces, ResizeFailed, SaveFailed, UserError, WorkerDied
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plan.processes import ProcessPlan
from corerl.plan.roles import RolePlan
from corerl.types import InitResult, ParallelLayout, Step
from corerl.weights.transport import Address
from tests.cluster.test_placement import Rooms as RealRooms
from tests.cluster.test_placement import rooms_of
from tests.driver.fakes import Ears, Group, make_updates, progress, told
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

    def reseat(self, assignments: Sequence[Any], slots: Sequence[Slot]) -> None:
        self.names = tuple(each.context.name for each in assignments)
        self.resized_to = assignments, slots


@define(eq=False, slots=False)
class Rooms:
    """Processes on devices by the placement's numbers; those that stay, where they are."""

    log: list[str]
    slots: dict[str, Sequence[Slot]]
    full: CorerlError | None = None
    arranged: list[tuple[Placement, Mapping[str, int]]] = field(factory=list)
    gone: set[int] = field(factory=set)  # bundles whose machine is

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

    silent: Sequence[str] = ()

    def settle(self, *, within: float) -> None:
        self.log.append(f"settle within {within:g}")
        if not self.gone:
            return
        for name, slots in self.slots.items():
            self.slots[name] = [
                evolve(slot, bundles=tuple(evolve(each, lost=each.index in self.gone) for each in slot.bundles))
                for slot in slots
            ]

    unused = 0

    def left(self, placement: Placement, name: str) -> int:
        shares = [name] if name in placement.apart else self.slots.keys() - set(placement.apart)
        return len({slot.bundles[0] for each in shares for slot in self.slots[each] if not slot.lost})

    def refit(self, placement: Placement, staying: Sequence[str]) -> dict[str, Sequence[Slot]]:
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
    sizes: Sizes
    log: list[str]
    ranks: dict[str, Ranks]
    engines: Engines
    room: Rooms
    saves: Saves
    updates: WeightUpdates

    def change(self, *overrides: str) -> list[str]:
        """What is told of each group, without the seconds that it took."""
        self.log.clear()
        return [line.rpartition(",")[0] for line in self.sizes.change(overrides)]

    def fails(self, error: type[Exception], *overrides: str) -> str:
        with pytest.raises(error) as caught:
            self.change(*overrides)
        return str(caught.value)

    @property
    def state(self) -> tuple[Any, ...]:
        """All that is to be as before where a change fails."""
        plan, updates = self.sizes.plan, self.updates
        path = plan.start.run_dir / "config.toml"
        written = path.read_text() if path.exists() else ""
        return plan, dict(self.room.slots), updates.manifest, updates.address, self.engines.names, written

    def starts(self) -> dict[str, int]:
        return {name: len(role.assignments) for name, role in self.sizes.plan.processes.roles.items()}


def make(
    tmp_path: Path, *, shared: Sequence[str] = (), plan: Plan | None = None, disaggregated: bool = False, **tables: Any
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
    where: Any = room
    writes: Any = [saves]
    sizes = Sizes(
        plan=plan,
        room=where,
        roles=roles_now,
        updates=updates,
        saves=writes,
        residency=memory,
        progress=progress(step=3),
        address_of=address,
    )
    return Case(sizes, log, ranks, engines, room, saves, updates)


def address(processes: ProcessPlan, receivers: Sequence[str]) -> Address:
    return Address(transport=processes.transport, engines=tuple(receivers), path="", senders=processes.senders)


def test_ranks_that_are_to_be_others_are_moved_and_all_else_stays(tmp_path: Path) -> None:
    case = make(tmp_path)
    assert case.sizes.now == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    assert case.log == ["complete True", "turns", "enter rest", "move actor", "changed actor", "take actor", "take"]
    ((placement, staying),) = case.room.arranged
    assert placement.places == {"actor": (0, 1), "critic": (0,), "engines": (0, 1)}
    assert staying == {"critic": 1, "engines": 2}
    moved = case.ranks["actor"].moved_to
    assert moved is not None
    assert (moved[0], moved[2]) == (case.sizes.plan.processes.roles["actor"], "step 3 of the actor")
    assert list(moved[1]) == list(case.room.slots["actor"]) and len(moved[1]) == 2
    assert case.sizes.now == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.starts() == {"actor": 2, "critic": 1}
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["roles"]["actor"]["ranks"] == case.sizes.plan.record["roles"]["actor"]["ranks"] == 2


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
        address(case.sizes.plan.processes, case.engines.names), token="met by 2 ranks"
    )
    case.change("rollout.replicas=3")
    assert case.updates.address.engines == case.engines.names == ("engine-0", "engine-1", "engine-2")
    assert len(case.updates.address.senders) == 3


def test_engines_get_the_devices_of_their_slots(tmp_path: Path) -> None:
    case = make(tmp_path, disaggregated=True)
    case.room.slots = slots_of(case.sizes.plan.processes.placement, moved=4)
    assert case.change("rollout.replicas=3") == ["engines: 2 -> 3"]
    assert case.log == ["complete True", "enter rest", "resize engines", "take engines", "changed engines", "take"]
    assert case.room.arranged[0][1] == {"actor": 1, "critic": 1, "engines": 2}
    resized = case.engines.resized_to
    assert resized is not None
    assert [each.context.devices for each in resized[0]] == [("5",), ("6",), ("3",)]  # the third one's is a newcomer's
    assert [slot.devices for slot in resized[1]] == [("5",), ("6",), ("3",)]


@pytest.mark.parametrize(
    ("replicas", "lines", "order"),
    [
        (1, ["engines: 2 -> 1", "actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"], ["engines", "actor"]),
        (3, ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)", "engines: 2 -> 3"], ["actor", "engines"]),
    ],
)
def test_engines_that_end_go_first_and_engines_that_come_are_last(
    replicas: int, lines: list[str], order: list[str], tmp_path: Path
) -> None:
    case = make(tmp_path, disaggregated=True)
    assert case.change(f"rollout.replicas={replicas}", "roles.actor.ranks=2") == lines
    assert [line.split()[1] for line in case.log if line.startswith("take ")] == order
    assert case.sizes.now == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": replicas}
    assert case.sizes.plan.record["rollout"]["replicas"] == replicas
    assert case.sizes.plan.record["roles"]["actor"]["ranks"] == 2


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
    processes = case.sizes.plan.processes
    resumed = {
        name: evolve(
            role,
            assignments=tuple(evolve(each, config=evolve(each.config, resume="a part")) for each in role.assignments),
        )
        for name, role in processes.roles.items()
    }
    case.sizes.plan = evolve(case.sizes.plan, processes=evolve(processes, roles=resumed))
    case.change("roles.critic.ranks=2")
    assert [line for line in case.log if line.startswith("move")] == ["move critic"]


def test_another_backend_or_layout_moves_the_roles_that_have_it(tmp_path: Path) -> None:
    case = make(tmp_path)
    lines = case.change("roles.critic.backend=deepspeed")
    assert lines == ["critic: 1 rank of fsdp (dp 1) -> 1 rank of deepspeed (dp 1)"]
    lines = case.change("backends.fsdp.reshard_after_forward=false")
    assert lines == ["actor: 1 rank of fsdp (dp 1) -> 1 rank of fsdp (dp 1)"]


# ---- machines that are gone ------------------------------------------------------------------------------------------


def of_two(tmp_path: Path, **tables: Any) -> Case:
    roles = {"actor": {"ranks": 2}, "critic": {"ranks": 1}}
    return make(tmp_path, roles=roles, **tables)


def test_where_no_machine_is_gone_nothing_changes(tmp_path: Path) -> None:
    case = of_two(tmp_path, cluster={"device": "cpu", "spare_timeout": 7})
    before = case.state
    assert case.sizes.refit() == [] and case.state == before
    assert case.log == ["settle within 7"]


def test_groups_that_were_on_a_machine_that_is_gone_become_as_small_as_they_must(tmp_path: Path) -> None:
    case = of_two(tmp_path)
    case.room.gone = {0}
    assert case.sizes.refit() == ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]
    assert case.starts() == {"actor": 1, "critic": 1} == recorded_ranks(case)
    assert case.engines.resized_to is not None
    assert [slot.devices for slot in case.engines.resized_to[1]] == [("1",)]
    assert [each.context.devices for each in case.engines.resized_to[0]] == [("1",)]
    assert [slot.devices for slot in case.room.slots["actor"]] == [("1",)]
    case.updates.renewed(case.updates.source)  # when ranks have started
    assert case.updates.address.engines == ("engine-0",)


def test_a_size_that_cannot_be_is_passed_over_for_a_smaller_one(tmp_path: Path) -> None:
    case = make(tmp_path, roles={"actor": {"ranks": 4}, "critic": {"ranks": 1}})
    case.room.gone = {3}
    assert case.sizes.refit() == ["actor: 4 ranks of fsdp (dp 4) -> 2 ranks of fsdp (dp 2)"]  # 3 would not divide


def test_a_layout_that_cannot_be_smaller_is_said_with_why_and_all_is_as_it_was(tmp_path: Path) -> None:
    tables = {"backends": {"fsdp": {"shard_size": 2}}, "algorithm": {"name": "grpo"}}
    case = make(tmp_path, roles={"actor": {"ranks": 2}}, **tables)
    before = case.sizes.plan
    case.room.gone = {1}
    with pytest.raises(NoPlaces, match="^roles.actor.ranks: devices are left for 1 of 2, where it cannot be that or "):
        case.sizes.refit()
    assert case.sizes.plan is before
    case.room.gone = {0, 1}
    with pytest.raises(NoPlaces, match="^roles.actor.ranks: devices are left for 0 of 2$"):
        case.sizes.refit()


@pytest.mark.parametrize(
    ("replicas", "gone", "lines"),
    [
        (4, {0, 1}, ["engines: 4 -> 2"]),
        (3, {0, 1}, ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 3 -> 2"]),
        (2, {2, 3}, ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]),
        (2, {0, 2}, ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]),
    ],
)
def test_a_group_that_has_lost_all_of_its_devices_gets_some_of_the_others(
    replicas: int, gone: set[int], lines: list[str], tmp_path: Path
) -> None:
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": replicas}
    roles = {"actor": {"ranks": 2}, "critic": {"ranks": 1}}
    case = make(tmp_path, roles=roles, rollout=rollout, disaggregated=True)
    case.room.gone = gone
    assert case.sizes.refit() == lines


def test_a_group_that_has_lost_its_only_device_to_one_that_has_only_one_cannot_be(tmp_path: Path) -> None:
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": 1}
    case = make(tmp_path, roles={"actor": {"ranks": 1}, "critic": {"ranks": 1}}, rollout=rollout, disaggregated=True)
    case.room.gone = {0}
    with pytest.raises(NoPlaces, match="^roles.actor.ranks: devices are left for 0 of 1$"):
        case.sizes.refit()


def test_before_engines_are_replaced_ranks_whose_machine_is_gone_are_ended(tmp_path: Path) -> None:
    case = of_two(tmp_path)
    ends: list[str] = []
    for name, ranks in case.ranks.items():
        nodes = [slot.node for slot in case.room.slots[name]]
        ranks.processes = SimpleNamespace(nodes=nodes, kill=lambda name=name: ends.append(name))  # type: ignore[attr-defined]
    assert case.sizes.refit_engines() == []
    case.room.gone = {1}
    with pytest.raises(WorkerDied, match="^actor rank 1: its machine is gone$"):
        case.sizes.refit_engines()
    assert ends == ["actor"] and case.starts() == {"actor": 2, "critic": 1}


def test_ranks_are_ended_for_engines_of_which_none_is_left(tmp_path: Path) -> None:
    case = of_two(tmp_path, disaggregated=True)
    ends: list[str] = []
    for name, ranks in case.ranks.items():
        nodes = [slot.node for slot in case.room.slots[name]]
        ranks.processes = SimpleNamespace(nodes=nodes, kill=lambda name=name: ends.append(name))  # type: ignore[attr-defined]
    case.room.gone = {2}
    before = dict(case.room.slots)
    case.log.clear()
    assert case.sizes.refit_engines() == ["engines: 2 -> 1"] and ends == []  # the other one is the third now
    assert case.log[:-1] == ["settle within 60"]  # once: it may take as long as that
    for name in ("actor", "critic"):  # these live
        assert [slot.devices for slot in case.room.slots[name]] == [slot.devices for slot in before[name]]
    with pytest.raises(WorkerDied, match="^actor: its ranks were ended to make room for engines, as no device of "):
        case.sizes.refit_engines()
    assert ends == ["actor"]


def in_room(
    case: Case, per_node: int, now: Sequence[str], monkeypatch: pytest.MonkeyPatch, engines: int = 0
) -> RealRooms:
    """The case's processes in a real room, where there were more engines once. Then the bundles are on the machines
    `now`, "" for none, as others are gone."""
    placement = case.sizes.plan.processes.placement
    begun = case.sizes.plan.resized([f"rollout.replicas={engines}"]).processes.placement if engines else placement
    room = rooms_of(monkeypatch, per_node)
    room.take(room.arrange(begun))
    room.take({"engines": room["engines"][: len(placement.places["engines"])]})
    case.sizes.room = room
    for ranks in case.ranks.values():
        nodes = [slot.node for slot in room[ranks.role]]
        ranks.processes = SimpleNamespace(nodes=nodes)  # type: ignore[attr-defined]
    room.moves = {("reservation 0", index): node for index, node in enumerate(now)}
    monkeypatch.setattr(of_cluster.nodes, "gone", lambda nodes: nodes - set(now))
    monkeypatch.setattr(
        of_cluster, "gpus_of_bundles", lambda _, at: ({index: Gpu(index, str(index)) for index in at}, {})
    )
    return room


def of_engines(tmp_path: Path, ranks: int, replicas: int) -> Case:
    """A run of ranks and engines apart, which waits for no spare machine."""
    roles = {"actor": {"ranks": ranks}, "critic": {"ranks": 1}}
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": replicas}
    cluster = {"device": "cpu", "placement": "disaggregated", "spare_timeout": 0}
    return make(tmp_path, roles=roles, rollout=rollout, cluster=cluster)


def indices(slots: Sequence[Slot]) -> list[int]:
    return [slot.bundles[0].index for slot in slots]


def test_ranks_that_live_stay_whatever_the_order_of_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = of_engines(tmp_path, 2, 4)
    # Two of four engines are on a machine that Ray's names, which have no order, put before the one of the ranks.
    room = in_room(case, 2, ["node 0", "node 0", "", "", "a node", "a node"], monkeypatch)
    before = {name: list(slots) for name, slots in room.items()}
    assert case.sizes.refit_engines() == ["engines: 4 -> 2"]
    assert {name: list(room[name]) for name in case.ranks} == {name: before[name] for name in case.ranks}
    assert indices(room["engines"]) == [4, 5] and room.reserved == [6]
    assert case.sizes.refit_engines() == []  # and is nothing of which a machine is gone


def test_devices_that_nobody_uses_are_given_to_one_group_and_none_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = of_engines(tmp_path, 4, 2)
    now = [*["node 0"] * 3, *[""] * 3, *["node 2"] * 2]  # a rank and both engines are lost, two devices are unused
    room = in_room(case, 3, now, monkeypatch, engines=4)
    assert case.sizes.refit() == ["engines: 2 -> 1"]
    used = indices(room["actor"]) + indices(room["engines"])
    assert sorted(used) == [0, 1, 2, 6, 7] and room.reserved == [8]


def test_sizes_and_devices_are_those_that_are_left_also_before_ranks_have_started_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_cluster.ray, "available_resources", lambda: {"CPU": 2.0})
    case = of_engines(tmp_path, 2, 2)
    room = in_room(case, 2, ["node 0", "node 0", "node 1", "node 1", "node 2", "node 2"], monkeypatch, engines=4)
    assert case.sizes.devices == Devices(reserved=6, unused=2, free=2)
    assert case.sizes.now == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": 2}
    room.moves = {("reservation 0", index): "" for index in range(2, 6)}
    monkeypatch.setattr(of_cluster.nodes, "gone", lambda nodes: nodes - {"node 0"})
    assert case.sizes.devices == Devices(reserved=2, unused=0, free=2)
    assert case.sizes.refit() == ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]
    assert case.sizes.now == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 1}
    assert case.sizes.devices == Devices(reserved=2, unused=0, free=2)
    assert case.change("rollout.replicas=1", "roles.actor.ranks=1") == []  # as asked for by who knows no better
    assert case.change("rollout.replicas=2") == ["engines: 1 -> 2"]


def test_no_rank_is_ended_for_engines_that_have_devices_that_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = of_engines(tmp_path, 2, 2)
    room = in_room(case, 2, ["node 0", "node 0", "", "", "node 2", "node 2"], monkeypatch, engines=4)
    assert case.sizes.refit_engines() == []
    assert (indices(room["actor"]), indices(room["engines"]), room.reserved) == ([0, 1], [4, 5], [6])


def test_what_the_cluster_refuses_is_told_as_groups_that_have_no_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = of_two(tmp_path)
    before = case.sizes.plan
    case.room.gone = {0}

    def fail(*_: object, **__: object) -> None:
        raise CorerlError("the cluster has no room")

    monkeypatch.setattr(case.room, "refit", fail)
    with pytest.raises(NoPlaces, match="^the cluster has no room$"):
        case.sizes.refit()
    assert case.sizes.plan is before


def test_a_gpu_that_does_not_answer_is_told_with_the_groups_that_get_smaller_or_have_no_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = "cannot tell which GPU bundle 3 has on node 8: no answer within 120 s"

    def gpus_of(_: object, at: Mapping[int, str]) -> tuple[dict[int, Gpu], dict[int, str]]:
        return {}, dict.fromkeys(at, silence)

    case = of_engines(tmp_path, 2, 2)
    room = in_room(case, 2, ["node 0", "node 0", "node 1", "node 8"], monkeypatch)
    monkeypatch.setattr(of_cluster, "gpus_of_bundles", gpus_of)
    assert case.sizes.refit_engines() == [silence, "engines: 2 -> 1"]
    assert indices(room["engines"]) == [2] and case.sizes.refit_engines() == []
    (tmp_path / "without").mkdir()
    case = of_engines(tmp_path / "without", 1, 1)
    in_room(case, 2, ["node 8", ""], monkeypatch)
    monkeypatch.setattr(of_cluster.nodes, "gone", lambda nodes: nodes)
    monkeypatch.setattr(of_cluster, "gpus_of_bundles", gpus_of)
    with pytest.raises(NoPlaces) as caught:
        case.sizes.refit()
    assert caught.value.message == f"roles.actor.ranks: devices are left for 0 of 1; {silence}"


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
    ears = Ears()
    case.sizes.progress = progress(ears, step=3)
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    assert case.log[:2] == ["complete True", "forget"]
    assert told(ears) == ["a copy in memory is lost: no memory"]


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


def test_a_role_that_was_moved_before_another_one_failed_is_noted_as_moved(tmp_path: Path) -> None:
    case = make(tmp_path)
    case.ranks["critic"].failure = ResizeFailed("no luck")
    changing = iter(case.sizes.change(["roles.actor.ranks=2", "roles.critic.ranks=2"]))
    assert next(changing).startswith("actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2), ")
    with pytest.raises(ResizeFailed, match=r"^no luck$"):
        next(changing)
    assert case.starts() == {"actor": 2, "critic": 1}
    assert [len(case.room.slots[name]) for name in ("actor", "critic")] == [2, 1]
    assert (case.updates.manifest, case.updates.address.token) == ("manifest of 2 ranks", "met by 2 ranks")
    case.ranks["critic"].failure = None
    case.change("roles.critic.ranks=2")
    assert [line for line in case.log if line.startswith("move")] == ["move critic"]
    assert case.starts() == {"actor": 2, "critic": 2}
    assert recorded_ranks(case) == {"actor": 2, "critic": 2}


def recorded_ranks(case: Case) -> dict[str, int]:
    written = tomllib.loads((case.sizes.plan.start.run_dir / "config.toml").read_text())
    return {name: written["roles"][name]["ranks"] for name in case.ranks}


@pytest.mark.parametrize("error", [ResizeFailed, UserError])
def test_of_roles_that_one_setting_moves_those_that_have_moved_go_back_where_another_cannot(
    tmp_path: Path, error: type[CorerlError]
) -> None:
    case = make(tmp_path)
    both = "backends.fsdp.reshard_after_forward=false"
    case.ranks["critic"].failure = error("no luck")
    before = case.sizes.plan
    assert case.fails(error, both) == "no luck"
    assert case.sizes.plan.processes.roles == before.processes.roles
    assert [line for line in case.log if line.startswith("move")] == ["move actor", "move critic", "move actor"]
    case.log.clear()
    case.change("rollout.replicas=2")  # which is nothing of these roles
    assert [line for line in case.log if line.startswith("move")] == []
    case.ranks["critic"].failure = None
    case.change(both)
    assert [line for line in case.log if line.startswith("move")] == ["move actor", "move critic"]


def test_engines_that_have_ended_are_noted_though_ranks_then_fail(tmp_path: Path) -> None:
    case = make(tmp_path, disaggregated=True)
    case.ranks["actor"].failure = ResizeFailed("no luck")
    case.fails(ResizeFailed, "rollout.replicas=1", "roles.actor.ranks=2")
    assert case.sizes.now == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 1}
    assert case.sizes.plan.record["rollout"]["replicas"] == 1
    assert case.updates.address.engines == ("engine-0",)


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


def wide(tmp_path: Path, transport: str, *, ranks: int = 4, replicas: int = 2) -> Case:
    roles = {"actor": {"ranks": ranks}}
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": replicas}
    tables: dict[str, Any] = {"backend": {"name": "fsdp"}, "roles": roles, "rollout": rollout}
    (tmp_path / "run").mkdir()
    plan = make_plan(config_in(tmp_path / "run", **tables))
    return make(tmp_path, plan=on_gpus(plan, transport))


def test_each_engine_is_sent_to_by_the_rank_on_its_device_wherever_it_stays(tmp_path: Path) -> None:
    case = wide(tmp_path, "ipc")
    assert case.sizes.plan.processes.senders == (0, 2)

    def arrange(placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        slots = case.room.slots
        return {"actor": slots["actor"], "engines": [*slots["engines"], slots["actor"][1], slots["actor"][3]]}

    case.sizes.room.arrange = arrange  # type: ignore[method-assign]  # as Room does it
    case.change("rollout.replicas=4")
    assert case.updates.address.senders == (0, 2, 1, 3)  # those of a run that begins so: 0, 1, 2, 3


def test_where_unused_devices_take_the_place_of_others_each_engine_is_sent_to_by_the_rank_that_is_beside_it_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = wide(tmp_path, "ipc", ranks=2)
    room = in_room(case, 1, ["", "node 1", "node 2", "node 3"], monkeypatch, engines=4)
    assert case.updates.address.senders == (0, 1)
    assert case.sizes.refit() == []  # as large as before
    case.updates.renewed(case.updates.source)  # when ranks have started
    ranks, engines = ([slot.bundles for slot in room[name]] for name in ("actor", "engines"))
    assert engines[1] == ranks[0]  # it stays, and is the first of those that are left
    assert case.updates.address.senders == tuple(ranks.index(each) for each in engines) == (1, 0)


def test_engines_that_would_have_no_rank_beside_them_are_refused_if_they_need_one(tmp_path: Path) -> None:
    case = wide(tmp_path, "ipc", replicas=1)
    before = case.state
    elsewhere = slots_of(case.sizes.plan.processes.placement, moved=7)["engines"]

    def arrange(placement: Placement, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        return {"actor": case.room.slots["actor"], "engines": [case.room.slots["engines"][0], *elsewhere]}

    case.sizes.room.arrange = arrange  # type: ignore[method-assign]
    assert case.fails(ConfigError, "rollout.replicas=2") == (
        "weights.transport: 'ipc', but engines that stay would be on devices without actor ranks; choose other sizes"
    )
    assert case.log == ["take"] and case.state == before


def test_another_transport_than_the_runs_is_refused(tmp_path: Path) -> None:
    case = make(tmp_path)
    processes = case.sizes.plan.processes
    case.sizes.plan = evolve(case.sizes.plan, processes=evolve(processes, transport="disk"))
    before = case.state
    assert case.fails(ConfigError, "roles.actor.ranks=2") == (
        "weights.transport: 'disk' while the run goes on, but these sizes need 'ipc'; set weights.transport='ipc' "
        "from the start, or choose other sizes"
    )
    assert case.log == [] and case.state == before
