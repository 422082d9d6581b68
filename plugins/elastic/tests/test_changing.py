"""What is done to a run's groups, in which order, where another plan is applied; and what is left if that fails."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve

from corerl.cluster import Slot
from corerl.errors import ConfigError, CorerlError, HookFailed, ResizeFailed, UserError, WorkerDied
from corerl_elastic.changing import sizes_of
from plugins.elastic.tests.cases import Case, make, wide
from tests.driver.fakes import told
from tests.driver.groups import slots_of


def test_a_resize_restarts_all_ranks_from_a_checkpoint(tmp_path: Path) -> None:
    case = make(tmp_path)
    assert sizes_of(case.groups) == {"roles.actor.ranks": 1, "roles.critic.ranks": 1, "rollout.replicas": 2}
    assert case.change("roles.actor.ranks=2") == ["actor: 1 rank of fsdp (dp 1) -> 2 ranks of fsdp (dp 2)"]
    ends = ["save", "end actor", "end critic", "engines sleep", "take actor critic"]
    assert case.log == [*ends, "start actor", "start critic", "changed actor critic", "take"]
    assert case.groups.changed == {"actor", "critic"}
    ((placement, staying),) = case.pool.asked
    assert placement.places == {"actor": (0, 1), "critic": (0,), "engines": (0, 1)}
    assert staying == {"engines": 2}
    for name, ranks in case.ranks.items():
        plan = case.groups.plan.processes.roles[name]
        assert ranks.restarted == (f"checkpoint/{name}", plan, case.pool.slots[name])
    assert sizes_of(case.groups) == {"roles.actor.ranks": 2, "roles.critic.ranks": 1, "rollout.replicas": 2}
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


# ---- what fails ------------------------------------------------------------------------------------------------------


def test_sizes_that_cannot_be_leave_all_as_it_was(tmp_path: Path) -> None:
    case = make(tmp_path)
    before = case.state
    told = case.fails(ConfigError, "rollout.replicas=1", "roles.actor.ranks=3")
    assert "do not divide evenly over roles.actor.ranks=3" in told
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
    assert case.log.count("save") == 1 and case.groups.changed == {"actor", "critic", "engines"}
    for name, ranks in case.ranks.items():
        assert ranks.restarted == (f"checkpoint/{name}", plan.processes.roles[name], slots[name])
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


# ---- how weights travel ----------------------------------------------------------------------------------------------


def place_engines(case: Case, slots: Sequence[Slot]) -> None:
    """Let engines that come be in these, as of a ResourcePool."""
    found = {**case.pool.slots, "engines": [*case.pool.slots["engines"], *slots]}
    case.pool.arranged = lambda placement, staying: found  # type: ignore[method-assign]


def test_each_engine_gets_weights_from_the_rank_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = wide(tmp_path, "ipc", monkeypatch)
    assert case.groups.plan.processes.colocated_ranks == (0, 2)
    place_engines(case, case.pool.slots["actor"][1::2])
    case.change("rollout.replicas=4")
    assert case.groups.update_address().colocated_ranks == (0, 2, 1, 3)  # those of a run that begins so: 0, 1, 2, 3


def test_engines_without_a_rank_on_their_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = wide(tmp_path, "ipc", monkeypatch, replicas=1)
    before = case.state
    place_engines(case, slots_of(case.groups.plan.processes.placement, moved=7)["engines"])
    told = case.fails(ConfigError, "rollout.replicas=2")
    assert told.startswith("weights.transport: 'ipc', but engines that stay would be on devices without actor ranks; ")
    assert case.log == ["take"] and case.state == before


def test_another_transport_than_the_runs_is_refused(tmp_path: Path) -> None:
    case = make(tmp_path)
    processes = case.groups.plan.processes
    case.groups.plan = evolve(case.groups.plan, processes=evolve(processes, transport="disk"))
    before = case.state
    told = case.fails(ConfigError, "roles.actor.ranks=2")
    assert told.startswith("weights.transport: 'disk' while the run goes on, but these sizes need 'ipc'; ")
    assert case.log == [] and case.state == before
