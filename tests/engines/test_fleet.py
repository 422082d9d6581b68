"""Two engine processes under real Ray, seen as one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.cluster.group import RayGroup
from corerl.cluster.placement import arrange, reserved
from corerl.cluster.runtime import ray_session
from corerl.config.schema import ModelConfig
from corerl.engines.base import EngineContext, GenerateRequest, Generation, SamplingParams
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineAssignment, EngineService
from corerl.errors import CorerlError, EngineFailed, WeightUpdateError, WorkerDied
from corerl.plugin.fingerprint import origins_of
from corerl.plugin.registry import Kind, load
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address
from corerl.weights.transports import open_sender
from tests.machine import paced

REQUEST = GenerateRequest(
    tokens=np.arange(10),
    offsets=np.array([0, 1, 3, 4, 8, 10]),
    noise_keys=np.array([7, 8, 9, 10, 11]),
    params=SamplingParams(max_tokens=6, stop_tokens=(2,)),
)


def assigned(count: int, *, bundles: int = 1) -> list[EngineAssignment]:
    return [
        EngineAssignment(
            engine="fake",
            origins=origins_of((Kind.ENGINES, load(Kind.ENGINES, "fake"))),
            model=ModelConfig(),
            options={},
            context=EngineContext(
                name=f"engine-{index}", index=index, device="cpu", precision="float32", bundles=bundles
            ),
        )
        for index in range(count)
    ]


@pytest.fixture
def fleet(shared_ray: None) -> Iterator[EngineFleet]:
    assignments = assigned(2)
    with ray_session(address="", cpus=2):
        with reserved(arrange({"engines": 2}), timeout=paced(60.0)) as slots:
            processes = RayGroup(
                ["engine-0", "engine-1"],
                "tests.engines.services:Mortal",
                slots["engines"],
                {"OMP_NUM_THREADS": "1"},
                failure=EngineFailed,
                threads=2,
            )
            fleet = EngineFleet(processes, assignments, restarts=1)
            fleet.start().result()
            yield fleet
            processes.kill()


def test_an_engine_of_several_ranks_has_as_many_receivers_under_its_name() -> None:
    assignments = assigned(2, bundles=2)
    fleet = EngineFleet([], assignments)  # type: ignore[arg-type]  # no process is asked
    assert fleet.receivers == ("engine-0", "engine-0", "engine-1", "engine-1")
    assert [list(each.context.receivers) for each in assignments] == [[0, 1], [2, 3]]


class Ending:
    """One process, which fails at first, and is gone afterwards."""

    def __init__(self) -> None:
        self.told: list[CorerlError] = [
            EngineFailed("engine-0: its server refused"),
            WorkerDied("engine-0: its process died during pause"),
        ]

    def start_some(self, method: str, arguments: Any) -> Any:
        return None

    def answers(self, pending: Any, counted: Any = None) -> dict[int, Any]:
        return {0: self.told.pop(0)}

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("restarts", [0, 3])
def test_where_a_failure_ends_all_engines_it_is_told_and_not_that_they_are_gone(restarts: int) -> None:
    fleet = EngineFleet(Ending(), assigned(1), restarts=restarts)  # type: ignore[arg-type]  # as much of it as is asked
    for _ in range(2):
        with pytest.raises(EngineFailed, match="^engine-0: its server refused$"):
            fleet.pause()


class Hanging:
    """One process, which answers nothing any more."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, method: str) -> str:
        return method

    def answered(self, pending: str, timeout: float) -> dict[int, Any]:
        assert 0 < timeout < 3600
        self.log.append(pending)
        return {}

    def kill(self) -> None:
        self.log.append("kill")


def test_engines_that_hang_are_ended_with_the_run() -> None:
    hanging = Hanging()
    EngineFleet(hanging, []).close()  # type: ignore[arg-type]  # as much of it as is asked
    assert hanging.log == ["pause", "close", "kill"]


class Half:
    """Two processes, of which the second one answers nothing, so that whoever waits for it waits for ever."""

    def start_some(self, method: str, arguments: Any) -> list[int]:
        return list(arguments)

    def answers(self, pending: list[int], counted: Any = None) -> dict[int, Any]:
        assert pending == [0], "waited for in vain"
        return {0: 8}

    def replace(self, replica: int, arguments: Any) -> None:
        assert replica == 1


def test_an_engine_that_hangs_is_asked_nothing_until_another_stands_in_its_place() -> None:
    fleet = EngineFleet(Half(), assigned(2), restarts=1)  # type: ignore[arg-type]  # as much of it as is asked
    hangs = {"engine-1": WeightUpdateError("no answer")}
    fleet.leave_out(hangs)
    assert fleet.sleep() == 8  # of the other one
    fleet.replace(hangs)
    with pytest.raises(AssertionError, match="waited for in vain"):
        fleet.sleep()


class Counting:
    """Two processes that draw; of the second one, nothing is known at first."""

    def start_some(self, method: str, arguments: dict[int, Any]) -> dict[int, Any]:
        return arguments

    def answers(self, pending: dict[int, Any], counted: Any = None) -> dict[int, Any]:
        (first,), (second,) = pending[0], pending[1]
        assert (len(first), len(second)) == (3, 2)
        for drawing in ({0: 1, 1: None}, {0: 2, 1: 1}, {0: None, 1: 1}, {1: 1}, {1: 2}):
            counted(drawing)
        return {replica: Generation.nothing(request) for replica, (request,) in pending.items()}


def test_the_rows_that_have_ended_are_counted_over_all_replicas() -> None:
    fleet = EngineFleet(Counting(), assigned(2))  # type: ignore[arg-type]  # as much of it as is asked
    told: list[tuple[int, int]] = []
    fleet.generate(REQUEST, lambda done, of: told.append((done, of)))
    assert told == [(1, 5), (3, 5), (3, 5), (4, 5), (5, 5)]


def test_the_process_of_an_engine_counts_each_request_by_itself(tmp_path: Path) -> None:
    service = EngineService(assigned(1)[0])
    seen: list[dict[int, tuple[int, int]]] = []

    class Draws:
        def generate(self, request: GenerateRequest, told: Any) -> Generation:
            told(2)
            if len(request) == 5:
                other = threading.Thread(target=service.generate, args=(request.rows(0, 3),))
                other.start()
                other.join()
            told(1)
            seen.append(dict(service.counts()))
            return Generation.nothing(request)

    service.engine = Draws()  # type: ignore[assignment]  # as much of an engine as is asked
    service.generate(REQUEST)
    own = threading.get_ident()
    inner, outer = seen
    assert sorted(inner.values()) == [(2, 5), (3, 3)] and inner[own] == (2, 5)
    assert outer == {own: (3, 5)}
    assert service.counts() == {}


class Late:
    """One process, whose successors do not start at first."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.log: list[str] = []

    def replace(self, replica: int, arguments: Any) -> None:
        self.log.append("start")
        if len(self.log) <= self.failing:
            raise EngineFailed("engine-0: start: no memory")

    def start_some(self, method: str, arguments: Any) -> Any:
        return list(arguments)

    def answers(self, pending: list[int], counted: Any = None) -> dict[int, Any]:
        return dict.fromkeys(pending, 8)

    def kill(self) -> None:
        self.log.append("kill")


def test_an_engine_that_does_not_start_is_tried_again_as_often_as_one_may_die() -> None:
    died = {"engine-0": WorkerDied("engine-0: its process died")}
    late = Late(failing=2)
    fleet = EngineFleet(late, assigned(1), restarts=3)  # type: ignore[arg-type]  # as much of it as is asked
    fleet.leave_out(died)
    fleet.replace(died)
    assert (late.log, fleet.dead, fleet.sleep()) == (["start"] * 3, False, 8)
    never = Late(failing=9)
    fleet = EngineFleet(never, assigned(1), restarts=3)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="^engine-0: start: no memory") as raised:
        fleet.replace(died)
    assert raised.value.__notes__ == ["the engine had already been restarted 3 times (rollout.restarts)"]
    assert never.log == ["start"] * 3 + ["kill"]


class Told:
    """Two processes. A call finds the second one dead while another takes its place."""

    def __init__(self) -> None:
        self.fleet = EngineFleet(self, assigned(2), restarts=1)  # type: ignore[arg-type]  # as much of it as is asked
        self.starting, self.told = threading.Event(), threading.Event()

    def start_some(self, method: str, arguments: Any) -> Any:
        return None

    def answers(self, pending: None, counted: Any = None) -> dict[int, Any]:
        died = WorkerDied("engine-1: its process died")
        self.replacing = threading.Thread(target=self.fleet.replace, args=({"engine-1": died},))
        self.replacing.start()
        assert self.starting.wait(60.0)
        return {0: 8, 1: died}

    def replace(self, replica: int, arguments: Any) -> None:
        self.starting.set()
        assert self.told.wait(60.0)

    def kill(self) -> None:
        raise AssertionError("all are ended, for a death that is mended already")


def test_a_death_that_is_told_while_another_takes_its_place_is_not_that_ones() -> None:
    processes = Told()
    assert processes.fleet.sleep() == 8
    processes.told.set()
    processes.replacing.join(60.0)
    assert not processes.fleet.dead


def push(fleet: EngineFleet, version: int, directory: Path) -> dict[str, str]:
    """Weights of `version` for all replicas; each one's error, or ""."""
    manifest = build_manifest([("weight", (4,))], dtype="float32", bucket_bytes=1024)
    address = Address(transport="disk", engines=fleet.names, path=str(directory), timeout=60.0)
    receiving = fleet.receive(manifest, version, address)
    sender = open_sender(address)
    sender.begin(manifest, version)
    sender.send(manifest.buckets[0], torch.ones(4))
    committed = dict(sender.commit())
    assert {name: received.error for name, received in fleet.received(receiving, 60.0).items()} == committed
    return committed


def joined_rows(request: GenerateRequest, generation: Generation) -> list[np.ndarray]:
    """Each row's prompt and response."""
    responses = np.split(generation.tokens, generation.offsets[1:-1])
    return [np.concatenate(pair) for pair in zip(request.by_row(), responses, strict=True)]


def kill(fleet: EngineFleet, replica: int) -> None:
    (pid,) = fleet.processes.wait(fleet.processes.start_some("pid", {replica: ()}))
    os.kill(pid, signal.SIGKILL)


def same(a: Generation, b: Generation) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "offsets", "logprobs", "versions", "truncated")
    )


def test_replicas_answer_as_one_and_nothing_while_paused_and_what_is_left_of_one_that_died_is_drawn_by_others(
    fleet: EngineFleet, tmp_path: Path
) -> None:
    assert fleet.receivers == fleet.names == ("engine-0", "engine-1")
    assert push(fleet, 3, tmp_path) == {"engine-0": "", "engine-1": ""}
    answered = fleet.generate(REQUEST)
    # The next turn of each row, in another order, is drawn where the one before it was.
    before = fleet.processes.wait(fleet.processes.start("last_drew"))
    assert before == [[0, 1, 3], [4, 8]]
    turns = [np.append(tokens, 5) for tokens in joined_rows(REQUEST, answered)][::-1]
    second = evolve(
        REQUEST,
        tokens=np.concatenate(turns),
        offsets=np.cumsum([0, *map(len, turns)]),
        noise_keys=REQUEST.noise_keys[::-1],
    )
    drawn = fleet.generate(second)
    assert fleet.processes.wait(fleet.processes.start("last_drew")) == [[3, 1, 0], [8, 4]]
    assert same(drawn, Generation.concatenate([fleet.generate(second.rows(row, row + 1)) for row in range(5)]))

    one_by_one = Generation.concatenate([fleet.generate(REQUEST.rows(row, row + 1)) for row in range(len(REQUEST))])
    assert same(answered, one_by_one)
    assert set(answered.versions) == {3}

    fleet.pause()
    nothing = fleet.generate(REQUEST)
    assert nothing.unfinished.all() and len(nothing.tokens) == 0
    fleet.resume()
    assert same(fleet.generate(REQUEST), answered)

    assert push(fleet, 4, tmp_path) == {"engine-0": "", "engine-1": ""}
    answered = fleet.generate(REQUEST)
    kill(fleet, 1)
    assert same(fleet.generate(REQUEST), answered) and fleet.dead
    assert not fleet.serves(1) and same(fleet.generate_aside(REQUEST), answered)
    assert fleet.draw(1, REQUEST) is None
    assert list(fleet.replace_dead()) == ["engine-1"] and not fleet.dead and not fleet.serves(1)
    fleet.lost_weights(["engine-0"])
    assert not fleet.serves(0)
    assert push(fleet, 5, tmp_path) == {"engine-0": "", "engine-1": ""}
    assert fleet.serves(0) and fleet.serves(1) and set(fleet.generate(REQUEST).versions) == {5}

    fleet.sleep()
    with pytest.raises(EngineFailed, match="put to sleep"):
        fleet.generate(REQUEST)


def test_a_replica_dies_as_often_as_is_allowed_between_two_completed_steps(fleet: EngineFleet, tmp_path: Path) -> None:
    for version in (0, 1):  # once each, since a step is completed in between
        push(fleet, version, tmp_path)
        kill(fleet, 0)
        assert len(fleet.generate(REQUEST)) == len(REQUEST) and fleet.dead
        assert list(fleet.replace_dead()) == ["engine-0"]
        if not version:
            fleet.step_completed()
    push(fleet, 2, tmp_path)
    kill(fleet, 0)
    with pytest.raises(WorkerDied, match="^engine-0: its process died during generate") as raised:
        fleet.generate(REQUEST)
    assert raised.value.__notes__ == ["the engine had already been restarted 1 time (rollout.restarts)"]
