"""What the extension does between steps, and where machines are gone, to a run whose processes are fakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corerl.config import config_of
from corerl.errors import ConfigError, CorerlError, InsufficientResources, ResizeFailed, WorkerDied
from corerl.plan import Plan
from corerl.plugin import RunStarted, StepFinished
from corerl_elastic import Devices, extension, scaling
from corerl_elastic.changing import sizes_of
from corerl_elastic.config import ElasticOptions
from corerl_elastic.extension import Elastic, devices_of, needed_by_balance
from corerl_elastic.places import Places
from corerl_elastic.sizes import resized
from corerl_testing import make_plan
from plugins.elastic.tests.cases import Case, make, recorded_ranks, wide
from tests.cluster.rooms import Rooms, are_left, gpus_answer, has_free, rooms_of
from tests.driver.saved import config_in

# ---- machines that are gone ------------------------------------------------------------------------------------------


def of_two(tmp_path: Path, **tables: Any) -> Case:
    roles = {"actor": {"ranks": 2}, "critic": {"ranks": 1}}
    return make(tmp_path, roles=roles, **tables)


def test_where_no_machine_is_gone_nothing_changes(tmp_path: Path) -> None:
    case = of_two(tmp_path)
    before = case.state
    assert case.replace_lost() == [] and case.state == before
    assert case.log == ["look"]


def test_groups_on_a_lost_machine_shrink_as_needed(tmp_path: Path) -> None:
    case = of_two(tmp_path)
    case.pool.gone = {0}
    assert case.replace_lost() == ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]
    assert case.starts() == {"actor": 1, "critic": 1} == recorded_ranks(case)
    assert case.engines.resized_to is not None
    assert [slot.devices for slot in case.engines.resized_to[1]] == [("1",)]
    assert [each.context.devices for each in case.engines.resized_to[0]] == [("1",)]
    assert [slot.devices for slot in case.pool.slots["actor"]] == [("1",)]
    assert case.groups.update_address().engines == ("engine-0",)


def test_an_impossible_size_is_passed_over_for_a_smaller_one(tmp_path: Path) -> None:
    case = make(tmp_path, roles={"actor": {"ranks": 4}, "critic": {"ranks": 1}})
    case.pool.gone = {3}
    assert case.replace_lost() == ["actor: 4 ranks of fsdp (dp 4) -> 2 ranks of fsdp (dp 2)"]  # 3 would not divide


def test_a_layout_that_cannot_shrink_changes_nothing(tmp_path: Path) -> None:
    tables = {"backends": {"fsdp": {"shard_size": 2}}, "algorithm": {"name": "grpo"}}
    case = make(tmp_path, roles={"actor": {"ranks": 2}}, **tables)
    before = case.groups.plan
    case.pool.gone = {1}
    with pytest.raises(InsufficientResources, match="^roles.actor.ranks: devices are left for 1 of 2, where it cannot"):
        case.replace_lost()
    assert case.groups.plan is before
    case.pool.gone = {0, 1}
    with pytest.raises(InsufficientResources, match="^roles.actor.ranks: devices are left for 0 of 2$"):
        case.replace_lost()


@pytest.mark.parametrize(
    ("replicas", "gone", "lines"),
    [
        (4, {0, 1}, ["engines: 4 -> 2"]),
        (3, {0, 1}, ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 3 -> 2"]),
        (2, {2, 3}, ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]),
        (2, {0, 2}, ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]),
    ],
)
def test_a_group_without_devices_gets_some_of_the_others(
    replicas: int, gone: set[int], lines: list[str], tmp_path: Path
) -> None:
    case = of_engines(tmp_path, 2, replicas)
    case.pool.gone = gone
    assert case.replace_lost() == lines


def test_ranks_are_ended_for_engines_of_which_none_is_left(tmp_path: Path) -> None:
    case = of_two(tmp_path, disaggregated=True)
    ends: list[str] = []
    for name, ranks in case.ranks.items():
        nodes = [slot.node for slot in case.pool.slots[name]]
        ranks.processes = SimpleNamespace(nodes=nodes, kill=lambda name=name: ends.append(name))  # type: ignore[attr-defined]
    case.pool.gone = {2}
    before = dict(case.pool.slots)
    case.log.clear()
    assert case.replace_lost(ranks=False) == ["engines: 2 -> 1"] and ends == []  # the other one is the third now
    for name in ("actor", "critic"):  # these live
        assert [slot.devices for slot in case.pool.slots[name]] == [slot.devices for slot in before[name]]
    with pytest.raises(WorkerDied, match="^actor: its ranks were ended to make room for engines, as no device of "):
        case.replace_lost(ranks=False)
    assert ends == ["actor"]


def test_ranks_that_lose_their_machine_during_the_wait_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of_engines(tmp_path, 2, 4)
    pool = in_room(case, 2, ["node 0", "node 0", "", "", "a node", "a node"], monkeypatch)
    ends: list[str] = []
    for ranks in case.ranks.values():
        ranks.processes.kill = lambda name=ranks.role: ends.append(name)  # type: ignore[attr-defined]

    def settle(self: Places, *, within: float) -> None:
        self.pool.moves |= {("reservation 0", index): "" for index in (0, 1)}  # type: ignore[attr-defined]
        self.pool.refresh()

    monkeypatch.setattr(Places, "settle", settle)
    with pytest.raises(WorkerDied, match="^actor rank 0: its machine is gone$"):
        case.replace_lost(ranks=False)
    assert ends == ["actor"] and indices(pool, "engines") == [2, 3, 4, 5]


def in_room(case: Case, per_node: int, now: Sequence[str], monkeypatch: pytest.MonkeyPatch, engines: int = 0) -> Rooms:
    """The case's processes in a real room, where there were more engines once. Then the bundles are on the machines
    `now`, "" for none, as others are gone."""
    placement = case.groups.plan.processes.placement
    begun = resized(case.groups.plan, [f"rollout.replicas={engines}"]).processes.placement if engines else placement
    pool = rooms_of(monkeypatch, per_node)
    pool.take(pool.arrange(begun))
    pool.take({"engines": pool["engines"][: len(placement.places["engines"])]})
    case.groups.pool = pool
    for ranks in case.ranks.values():
        nodes = [slot.node for slot in pool[ranks.role]]
        ranks.processes = SimpleNamespace(nodes=nodes)  # type: ignore[attr-defined]
    pool.moves = {("reservation 0", index): node for index, node in enumerate(now)}
    are_left(monkeypatch, *now)
    gpus_answer(monkeypatch)
    return pool


def of_engines(tmp_path: Path, ranks: int, replicas: int) -> Case:
    """A run of ranks and engines apart, which waits for no spare machine."""
    roles = {"actor": {"ranks": ranks}, "critic": {"ranks": 1}}
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": replicas}
    return make(tmp_path, roles=roles, rollout=rollout, disaggregated=True)


def indices(pool: Rooms, name: str) -> list[int]:
    return [slot.bundles[0].index for slot in pool[name]]


def test_ranks_that_live_stay_whatever_the_order_of_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = of_engines(tmp_path, 2, 4)
    # Two of four engines are on a machine that Ray's names, which have no order, put before the one of the ranks.
    pool = in_room(case, 2, ["node 0", "node 0", "", "", "a node", "a node"], monkeypatch)
    before = {name: list(slots) for name, slots in pool.items()}
    assert case.replace_lost(ranks=False) == ["engines: 4 -> 2"]
    assert {name: list(pool[name]) for name in case.ranks} == {name: before[name] for name in case.ranks}
    assert indices(pool, "engines") == [4, 5] and pool.reserved == [6]
    assert case.replace_lost(ranks=False) == []  # and is nothing of which a machine is gone


def test_unused_devices_go_to_a_group_that_lost_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of_engines(tmp_path, 4, 2)
    now = [*["node 0"] * 3, *[""] * 3, *["node 2"] * 2]  # a rank and both engines are lost, two devices are unused
    pool = in_room(case, 3, now, monkeypatch, engines=4)
    assert case.replace_lost() == ["engines: 2 -> 1"]
    used = indices(pool, "actor") + indices(pool, "engines")
    assert sorted(used) == [0, 1, 2, 6, 7] and pool.reserved == [8]


def test_sizes_and_devices_count_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_free(monkeypatch, CPU=2.0)
    case = of_engines(tmp_path, 2, 2)
    pool = in_room(case, 2, ["node 0", "node 0", "node 1", "node 1", "node 2", "node 2"], monkeypatch, engines=4)
    assert devices_of(case.groups) == Devices(reserved=6, unused=2, free=2)
    assert sizes_of(case.groups) == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": 2}
    pool.moves = {("reservation 0", index): "" for index in range(2, 6)}
    are_left(monkeypatch, "node 0")
    assert devices_of(case.groups) == Devices(reserved=2, unused=0, free=2)
    assert case.replace_lost() == ["actor: 2 ranks of fsdp (dp 2) -> 1 rank of fsdp (dp 1)", "engines: 2 -> 1"]
    assert sizes_of(case.groups) == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 1}
    assert devices_of(case.groups) == Devices(reserved=2, unused=0, free=2)
    assert case.change("rollout.replicas=1", "roles.actor.ranks=1") == []  # as asked for by who knows no better
    assert case.change("rollout.replicas=2") == ["engines: 1 -> 2"]


def test_engines_on_replacement_devices_get_the_sender_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = wide(tmp_path, "ipc", monkeypatch, ranks=2)
    pool = in_room(case, 1, ["", "node 1", "node 2", "node 3"], monkeypatch, engines=4)
    assert case.replace_lost() == []  # as large as before
    ranks, engines = ([slot.bundles for slot in pool[name]] for name in ("actor", "engines"))
    assert engines[1] == ranks[0]  # it stays, and is the first of those that are left
    assert case.groups.update_address().colocated_ranks == tuple(ranks.index(each) for each in engines) == (1, 0)


# ---- who wants other sizes -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Changing` notes what it is to become."""

    def resize(run: Changing, overrides: Sequence[str]) -> list[str]:
        return run.apply(run.plan.resized(overrides))

    monkeypatch.setattr(extension, "resize", resize)


class Changing:
    """A run: what is applied is noted, and then comes the error, if there is one."""

    def __init__(self, run_dir: Path, *, scaler: Any = None, error: CorerlError | None = None) -> None:
        self.step = 0
        self.sizes = {"roles.actor.ranks": 2, "rollout.replicas": 2}
        self.error = error
        self.applied: list[dict[str, int]] = []
        self.told: list[str] = []
        self.silent_at = -1  # the step after which nobody tells what devices there are
        self.elastic = Elastic(options=ElasticOptions(), run_dir=str(run_dir))
        if scaler is not None:
            self.elastic._scaling = scaling.Scaling(name="mine:decide", scaler=scaler)
        self.pool = SimpleNamespace(count=self._count)

    def _count(self, bundle: object) -> tuple[int, int, int]:
        if self.step == self.silent_at:
            raise CorerlError("Ray does not tell how many devices there are: GCS is unavailable")
        return 4, 0, 0

    @property
    def plan(self) -> Any:
        return Planned(self.sizes)

    def apply(self, plan: Any) -> list[str]:
        changed = {name: value for name, value in plan.sizes.items() if self.sizes[name] != value}
        if self.applied and self.error is not None:
            raise self.error
        self.applied.append(changed)
        self.sizes = dict(plan.sizes)
        return [f"{name} is {value}" for name, value in changed.items()]

    def notice(self, text: str) -> None:
        self.told.append(text)

    def end_step(self, step: int) -> None:
        self.step = step
        self.elastic.between_steps(self)  # type: ignore[arg-type]


class Planned:
    """A plan of which only the sizes matter."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        engine = SimpleNamespace(assignments=[None] * self.sizes["rollout.replicas"])
        roles = {"actor": SimpleNamespace(assignments=[None] * self.sizes["roles.actor.ranks"])}
        self.processes = SimpleNamespace(engine=engine, roles=roles, placement=SimpleNamespace(bundle={}))

    def resized(self, overrides: Sequence[str]) -> Planned:
        return Planned(self.sizes | {name: int(value) for name, value in (each.split("=") for each in overrides)})


def ask(run: Changing, run_dir: Path, *overrides: str) -> scaling.Answer:
    def runs() -> bool:
        run.end_step(3)
        return True

    return scaling.ask(run_dir, overrides, runs=runs, notify=lambda line: None)


def test_a_request_is_answered_with_changes_or_the_reason(tmp_path: Path) -> None:
    run = Changing(tmp_path)
    assert ask(run, tmp_path, "roles.actor.ranks=1") == scaling.Answer(changed=("roles.actor.ranks is 1",))
    assert ask(run, tmp_path, "rollout.replicas=3") == scaling.Answer(changed=("rollout.replicas is 3",))
    run.error = ResizeFailed("no luck")
    assert ask(run, tmp_path, "rollout.replicas=2") == scaling.Answer(changed=(), error="no luck")
    assert run.told == ["resize rejected: no luck"]
    run.error = WorkerDied("gone")
    died: list[CorerlError] = []

    def dies() -> bool:
        try:
            run.end_step(4)
        except WorkerDied as error:  # for whom the run starts the ranks anew
            died.append(error)
        return not died

    found = scaling.ask(tmp_path, ["roles.actor.ranks=1"], runs=dies, notify=lambda line: None)
    assert found == scaling.Answer(changed=(), error="gone") and died == [run.error]


def test_a_scaler_is_asked_again_once_devices_are_told(tmp_path: Path) -> None:
    seen: list[int] = []

    def decide(sizing: scaling.Sizing) -> Any:
        seen.append(sizing.step)
        return {}

    run = Changing(tmp_path, scaler=decide)
    run.silent_at = 2
    for step in (1, 2, 3):
        run.end_step(step)
    assert seen == [1, 3] and run.applied == []
    (told,) = run.told
    assert told.startswith("the scaler is not asked after this step: Ray does not tell how many devices there are: ")


def test_a_scaler_is_asked_each_step_until_it_fails(tmp_path: Path) -> None:
    wanted: list[Any] = [{}, {"rollout.replicas": 1}, {"rollout.replicas": 1}, {"rollout.replicas": 1.5}]
    seen: list[tuple[int, int, float]] = []

    def decide(sizing: scaling.Sizing) -> Any:
        assert sizing.devices == Devices(reserved=4, unused=0, free=0)
        seen.append((sizing.step, sizing.spent.steps, sizing.spent.seconds))
        return wanted.pop(0)

    run = Changing(tmp_path, scaler=decide)
    for step, seconds in ((1, 2.0), (2, 4.0), (3, 8.0), (4, 6.0), (5, 1.0)):
        run.elastic.observe(StepFinished(step=step - 1, metrics={"time/step": seconds}))
        run.end_step(step)
    # The step after a change has the seconds of that too.
    assert seen == [(1, 1, 2.0), (2, 2, 3.0), (3, 0, 0.0), (4, 1, 6.0)]
    assert run.applied == [{"rollout.replicas": 1}]
    (line,) = run.told
    assert line.startswith("scaler: mine:decide returned {'rollout.replicas': 1.5}, expected an integer for ")
    assert line.endswith("; it is not asked again")


# ---- before a run ----------------------------------------------------------------------------------------------------


def planned(run_dir: Path, scaler: str, placement: str) -> Plan:
    """The plan of a run that lists the extension with this scaler."""
    run_dir.mkdir()
    chosen = {"name": "elastic", "options": {"scaler": scaler}}
    cluster = {"device": "cpu", "placement": placement}
    return make_plan(config_in(run_dir, backend={"name": "fsdp"}, extensions=[chosen], cluster=cluster))


def test_devices_are_balanced_only_where_groups_are_apart(tmp_path: Path) -> None:
    scaler = "corerl_elastic:balance"
    assert planned(tmp_path / "apart", scaler, "disaggregated").extensions[0].options.scaler == scaler
    with pytest.raises(ConfigError, match="^extensions.elastic.scaler: 'corerl_elastic:balance' moves devices, one by"):
        planned(tmp_path / "together", scaler, "colocated")


def test_devices_are_balanced_only_for_engines_of_one_device() -> None:
    config = config_of({"backend": {"name": "fsdp"}, "cluster": {"placement": "disaggregated"}})

    def needed(width: int) -> str:
        placement = SimpleNamespace(widths={"engines": width})
        return needed_by_balance(SimpleNamespace(config=config, processes=SimpleNamespace(placement=placement)))  # type: ignore[arg-type]

    assert (needed(1), needed(2)) == ("", "give each engine one device, where these have 2")


def test_a_run_with_a_scaler_can_be_evaluated(tmp_path: Path) -> None:
    trained = planned(tmp_path / "run", "corerl_elastic:balance", "disaggregated")
    own = [f"run.dir={tmp_path}/scores", "run.mode=eval", "data.held_out=4"]
    assert make_plan(config_of(trained.record, own)).run.mode == "eval"


def test_an_unlisted_extension_joins_and_drops_an_old_request(tmp_path: Path) -> None:
    (run_dir := tmp_path / "run").mkdir()
    plan = make_plan(config_in(run_dir, backend={"name": "fsdp"}, extensions=[{"name": "jsonl"}]))
    assert "elastic" in [each.name for each in plan.extensions]
    (run_dir / scaling.REQUEST).write_text("{}")
    run = Changing(run_dir)
    assert (run_dir / scaling.REQUEST).exists()  # as where a config is only checked
    run.elastic.observe(RunStarted(run_dir=str(run_dir), steps=9, first_step=0, title="", mode="train", same_run=False))
    run.end_step(1)
    assert run.told == [] and not (run_dir / scaling.REQUEST).exists()
