from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from attrs import evolve

from corerl.calls import Future
from corerl.driver.residency import Residency
from corerl.plan.residency import FORWARD, REST, SAMPLE, UPDATE, residency_stages, save_stage, train_stage
from corerl.types import MemoryKind, SleepResult
from tests.driver.fakes import Ears, Group, colocated, progress, told
from tests.end_to_end.command import numbers
from tests.in_process import execute_here, small

GIB = 2**30
ALL = frozenset(MemoryKind)
STEP = (
    SAMPLE,
    FORWARD,
    train_stage("critic"),
    train_stage("actor"),
    UPDATE,
    save_stage("actor"),
    save_stage("critic"),
    SAMPLE,
)


class Device:
    """What ranks of two roles and one engine hold, in bytes; each wants to know that it is not there already."""

    SIZES: Mapping[MemoryKind, int] = {
        MemoryKind.PARAM: 2,
        MemoryKind.MASTER: 4,
        MemoryKind.GRAD: 4,
        MemoryKind.OPTIMIZER: 8,
    }
    WEIGHTS, CACHE = 2, 10

    def __init__(self) -> None:
        self.held: dict[str, set[MemoryKind]] = {"actor": set(ALL), "critic": set(ALL)}
        self.engine = 0
        self.most = 0

    @property
    def used(self) -> int:
        return self.engine + sum(self.SIZES[kind] for kinds in self.held.values() for kind in kinds)


class Ranks(Group):
    def __init__(self, device: Device, role: str) -> None:
        super().__init__()
        self.device, self.role, self.totals = device, role, (0, 0)

    def sleep(self, kinds=()):  # type: ignore[no-untyped-def]
        held, before = self.device.held[self.role], self.device.used
        assert held >= set(kinds)
        held -= set(kinds)
        left = 3 + sum(self.device.SIZES[kind] for kind in held)
        rank = SleepResult(freed_bytes=0, residual_bytes=left * GIB, used_bytes=before * GIB)
        other = evolve(rank, residual_bytes=GIB, used_bytes=GIB)  # on an emptier device
        ranks = [evolve(each, total_bytes=total) for each, total in zip((rank, other), self.totals, strict=True)]
        return Future(self, self.ready, lambda: ranks)

    def wake_up(self, kinds=()):  # type: ignore[no-untyped-def]
        assert not self.device.held[self.role] & set(kinds)
        self.device.held[self.role] |= set(kinds)
        self.device.most = max(self.device.most, self.device.used)
        return Future(self, self.ready, lambda: None)


class Engine(Group):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def sleep(self, kinds=()):  # type: ignore[no-untyped-def]
        self.device.engine = 0

    def wake_up(self, kinds=()):  # type: ignore[no-untyped-def]
        self.device.engine = Device.WEIGHTS
        self.device.most = max(self.device.most, self.device.used)

    def generate(self) -> None:
        assert self.device.engine == Device.WEIGHTS
        self.device.engine += Device.CACHE


def shared(device: Device, engine: Engine) -> Residency:
    groups = {role: Ranks(device, role) for role in device.held}
    return colocated(groups, passed=["actor", "critic"], fleet=engine)  # type: ignore[arg-type]


def test_the_peak_of_a_step_is_one_training_role() -> None:
    device = Device()
    engine = Engine(device)
    residency = shared(device, engine)
    residency.enter(SAMPLE)  # both roles were built
    residency.metrics()
    engine.generate()
    device.most = 0
    for stage in STEP[1:]:
        residency.enter(stage)
    assert device.most == 2 + 4 + 4 + 8
    assert residency.metrics() == {
        "memory/forward_gib": 2.0 + 2.0,
        "memory/train_critic_gib": 18.0,
        "memory/train_actor_gib": 18.0,
        "memory/save_actor_gib": 14.0 + Device.WEIGHTS,
        "memory/save_critic_gib": 14.0 + Device.WEIGHTS,
        "memory/asleep_gib": 3.0,
    }
    for stage in (UPDATE, SAMPLE):  # in a step that saves, more is taken after the update before anything sleeps
        residency.enter(stage)
    assert residency.metrics() == {"memory/update_gib": 2.0 + Device.WEIGHTS, "memory/asleep_gib": 3.0}
    assert residency.metrics() == {}


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        (["actor", "critic"], {"train critic": ["critic"], "train actor": ["actor"]}),
        (["actor"], {"train actor": ["actor"]}),
        (["actor", "critic", "elsewhere"], {"train critic": ["critic", "elsewhere"], "train actor": ["actor"]}),
        (["elsewhere"], {"train": ["elsewhere"]}),
    ],
)
def test_roles_on_one_device_train_in_turns(roles: list[str], turns: dict[str, list[str]]) -> None:
    assert colocated({"actor": Group(), "critic": Group()}).turns(roles) == turns


def test_what_a_rank_says_of_its_sleep_reaches_the_user() -> None:
    actor, ears = Group(), Ears()
    actor.slept = [evolve(actor.slept[0], notes=notes) for notes in ((), ("host memory could not be pinned",))]
    stages = residency_stages(["actor"], passed=[])
    residency = Residency(stages=stages, groups={"actor": actor}, progress=progress(ears))  # type: ignore[dict-item]
    residency.enter(SAMPLE)
    assert told(ears) == ["actor rank 1: host memory could not be pinned"]


class Sized(Engine):
    """Tells what it gives back."""

    def sleep(self, kinds=()):  # type: ignore[no-untyped-def]
        freed = self.device.engine * GIB
        super().sleep()
        return freed


def take_steps(residency: Residency, engine: Sized, *stages: str, count: int = 2) -> None:
    for _ in range(count):
        residency.enter(SAMPLE)
        if engine.device.engine == Device.WEIGHTS:
            engine.generate()
        for stage in (*stages, UPDATE, SAMPLE):
            residency.enter(stage)


def measured(
    *totals: int, roles: Sequence[str] = ("actor",), trained: Sequence[str] = ("actor",), steps: int = 2
) -> tuple[Residency, Device, Sized]:
    """After steps in which these roles are trained, on devices of so many GiB."""
    device = Device()
    device.held = {role: set(ALL) for role in roles}
    engine, groups = Sized(device), {role: Ranks(device, role) for role in roles}
    for group in groups.values():
        group.totals = tuple(total * GIB for total in totals)
    residency = colocated(groups, passed=roles, fleet=engine)  # type: ignore[arg-type]
    residency.measures = True
    take_steps(residency, engine, FORWARD, *map(train_stage, trained), count=steps)
    return residency, device, engine


# The actor in training takes 18 GiB of a device, the engine 12.
@pytest.mark.parametrize(
    ("totals", "stays"), [((38, 38), True), ((37, 37), False), ((37, 80), False), ((80, 38), True)]
)
def test_ranks_and_engines_stay_once_steps_have_shown_room(totals: tuple[int, int], stays: bool) -> None:
    residency, device, _ = measured(*totals)
    line = residency.settle()
    assert (f"need 30.0 of {min(totals)}.0 GiB" in line) == stays and bool(line) == stays
    held = device.engine
    for stage in (train_stage("actor"), UPDATE, save_stage("actor")):
        residency.enter(stage)
        assert not stays or (device.held["actor"] == ALL and device.engine == held)
    assert residency.settle() == "" or not stays
    residency.enter(REST)  # as before new engines load
    assert not device.held["actor"] and not device.engine
    residency.enter(save_stage("actor"))
    assert not device.engine


@pytest.mark.parametrize("changed", ["ranks", "engines", "moved"])
def test_new_ranks_or_engines_take_turns_until_measured(changed: str) -> None:
    residency, device, engine = measured(38, 38)
    assert residency.settle()
    if changed == "ranks":
        device.held["actor"] = set(ALL)
        residency.ranks_changed(["actor"])
    elif changed == "engines":
        residency.engines_changed()
    else:
        residency.take_turns()
    residency.enter(train_stage("actor"))
    assert (device.engine, device.held["actor"]) == (0, ALL)
    assert residency.settle() == ""
    take_steps(residency, engine, train_stage("actor"))
    assert residency.settle()


def test_taking_turns_changes_no_number_of_a_run(tmp_path: Path) -> None:
    steps = {}
    for name in ("never", "always"):
        config = small(
            tmp_path,
            f"run.dir={tmp_path}/{name}",
            f"cluster.offload={name}",
            *("run.steps=3", "checkpoint.every=2", "roles.critic.ranks=1", "extensions=[{name='jsonl'}]"),
            *("algorithm.name=ppo", "algorithm.kl_coef=0.1", "algorithm.old_logprobs=recompute"),
        )
        assert execute_here(config).reason == "finished"
        steps[name] = numbers(tmp_path / name)
    taken = {number for step in steps["always"] for number in step if number.startswith("memory/")}
    assert taken >= {f"memory/{stage}_gib" for stage in ("train_actor", "train_critic", "save_critic", "asleep")}
    without = [{number: value for number, value in step.items() if number not in taken} for step in steps["always"]]
    assert without == steps["never"]
    assert len(without) == 3


def test_engines_sleep_once_while_ranks_restart() -> None:
    both = Group()
    residency = colocated({"actor": both}, fleet=both)
    residency.enter(SAMPLE)
    both.log.clear()
    residency.make_room()
    residency.make_room()
    assert both.log == ["sleep"]
    apart = Residency(progress=progress(), fleet=Group())  # type: ignore[arg-type]
    apart.make_room()
    assert apart.fleet.log == []  # type: ignore[union-attr]
