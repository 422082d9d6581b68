"""Engines that start, die, are replaced, and become more or fewer, as a fleet of fakes; real ones are in
tests/end_to_end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from attrs import evolve

from corerl.engines.base import GenerateRequest, Received
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, EngineFailed, WeightUpdateError, WorkerDied
from corerl.event_loop import EventLoop
from tests.engines.fleets import REQUEST, Group, Sized, assigned, fleet_of, respond, same, sample


def test_an_engine_has_a_receiver_per_rank(loop: EventLoop) -> None:
    assignments = assigned(2, bundles=2)
    fleet = EngineFleet([], assignments, loop)  # type: ignore[arg-type]  # no process is asked
    assert fleet.receivers == ("engine-0", "engine-0", "engine-1", "engine-1")
    assert [list(each.context.receivers) for each in assignments] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("restarts", [0, 3])
def test_later_calls_raise_the_failure_that_ended_all_engines(restarts: int, loop: EventLoop) -> None:
    answers: dict[int, Any] = {0: EngineFailed("engine-0: its server refused")}
    fleet = fleet_of(Group(answers), loop, 1, restarts=restarts)
    for _ in range(2):
        with pytest.raises(EngineFailed, match="^engine-0: its server refused$"):
            fleet.sleep()
        answers[0] = WorkerDied("engine-0: its process died during pause")


def test_a_hanging_engine_gets_no_calls_until_replaced(loop: EventLoop) -> None:
    fleet = fleet_of(Group({0: 8}), loop, 2, restarts=1)
    hangs = {"engine-1": WeightUpdateError("no answer")}
    fleet.leave_out(hangs)
    assert fleet.sleep() == 8  # of the other one
    fleet.replace(hangs)
    with pytest.raises(AssertionError, match="waited for in vain"):
        fleet.sleep()


def test_failed_starts_are_repeated_up_to_the_restarts(loop: EventLoop) -> None:
    died = {"engine-0": WorkerDied("engine-0: its process died")}
    late = Group({0: 8}, failing_starts=2)
    fleet = fleet_of(late, loop, 1, restarts=3)
    fleet.leave_out(died)
    fleet.replace(died)
    assert late.log == ["replace 0"] * 3
    assert not fleet.deaths and fleet.sleep() == 8
    never = Group({0: 8}, failing_starts=9)
    fleet = fleet_of(never, loop, 1, restarts=3)
    for _ in range(2):  # the second time at once
        with pytest.raises(EngineFailed, match="^engine-0: start: no memory") as raised:
            fleet.replace(died)
    assert raised.value.__notes__ == ["the engine had already been restarted 3 times (rollout.restarts)"]
    assert never.log == ["replace 0"] * 3 + ["kill"]


def test_an_engine_that_dies_in_its_start_is_replaced(loop: EventLoop) -> None:
    died = WorkerDied("engine-1: its process died during start")
    starting = Group({0: None, 1: died})
    fleet = fleet_of(starting, loop, 2, restarts=1)
    assert fleet.start().result() == {"engine-1": died}
    fleet.replace({"engine-1": died})
    assert starting.log == ["wait for all", "replace 1"] and not fleet.deaths and not fleet.all_serve

    starting = Group({0: None, 1: died})
    fleet = fleet_of(starting, loop, 2)
    with pytest.raises(WorkerDied, match="^engine-1: its process died during start$"):
        fleet.replace(fleet.start().result())
    assert starting.log == ["wait for all", "kill"]

    starting = Group({0: None, 1: EngineFailed("engine-1: start: no such model")})
    with pytest.raises(EngineFailed, match="no such model"):
        fleet_of(starting, loop, 2, restarts=1).start().result()
    assert starting.log == ["kill"]


def test_a_death_in_an_update_keeps_its_details(loop: EventLoop) -> None:
    died = WorkerDied("engine-1: its process died during receive")
    died.details = "what Ray says of it"
    found = fleet_of(Group({0: Received(bytes=8), 1: died}), loop, 2).received([], 0.0)
    assert found == {"engine-1": Received(bytes=0, error=died.message, died=True, details="what Ray says of it")}


class ReplacedMeanwhile:
    """Two processes. A call finds the second one dead while another takes its place."""

    def __init__(self, loop: EventLoop) -> None:
        self.fleet = fleet_of(self, loop, 2, restarts=1)
        self.starting, self.reported = threading.Event(), threading.Event()

    def start_some(self, method: str, arguments: Any) -> Any:
        return None

    def answers(self, pending: None, *, on_ended: Any) -> dict[int, Any]:
        died = WorkerDied("engine-1: its process died")
        self.replacing = threading.Thread(target=self.fleet.replace, args=({"engine-1": died},))
        self.replacing.start()
        assert self.starting.wait(60.0)
        return {0: 8, 1: died}

    def replace(self, replica: int, arguments: Any) -> None:
        self.starting.set()
        assert self.reported.wait(60.0)

    def kill(self) -> None:
        raise AssertionError("all are ended, though the dead one is replaced already")


def test_a_late_report_of_death_spares_the_successor(loop: EventLoop) -> None:
    processes = ReplacedMeanwhile(loop)
    assert processes.fleet.sleep() == 8
    processes.reported.set()
    processes.replacing.join(60.0)
    assert not processes.fleet.deaths


def resize(fleet: EngineFleet, count: int) -> None:
    fleet.resize(assigned(count), range(count))


def updated(fleet: EngineFleet) -> None:
    fleet.updated(fleet.names)


def test_resizing_does_not_change_samples(loop: EventLoop) -> None:
    stays = fleet_of(Sized(2), loop, 2)
    expected = sample(stays, REQUEST)
    sized = Sized(2)
    fleet = fleet_of(sized, loop, 2)
    for count in (2, 4, 1, 3, 2):
        resize(fleet, count)
        assert len(fleet) == sized.size == count
        assert fleet.names == fleet.receivers == tuple(f"engine-{index}" for index in range(count))
        assert same(sample(fleet, REQUEST), expected)
        updated(fleet)
        sized.asked.clear()
        assert same(sample(fleet, REQUEST), expected)
        assert sorted(replica for replica, _, _ in sized.asked) == list(range(count))
    assert sized.log == [
        "grow ['engine-2', 'engine-3'] in range(2, 4)",
        *("pause [1, 2, 3]", "close [1, 2, 3]", "shrink 3"),
        "grow ['engine-1', 'engine-2'] in range(1, 3)",
        *("pause [2]", "close [2]", "shrink 1"),
    ]


@pytest.mark.parametrize("rows", [None, 1])
def test_others_take_over_from_an_engine_that_is_ended(rows: int | None, loop: EventLoop) -> None:
    def first_answer(request: GenerateRequest) -> Any:
        if rows is None:
            return WorkerDied("engine-1: its process died during generate")
        return respond(request, rows=rows)  # since it was paused

    sized = Sized(2, first_answer)
    sized.gates = {0: threading.Event(), 1: threading.Event()}
    fleet = fleet_of(sized, loop, 2)
    first = loop.begin(fleet.generate(REQUEST))
    assert all(sized.sampling.acquire(timeout=60.0) for _ in range(2))
    second = loop.begin(fleet.generate(REQUEST.row_range(0, 1)))  # waits for the last one, which has fewer to draw
    resize(fleet, 1)
    assert fleet.names == ("engine-0",)
    assert sized.log == ["pause [1]", "close [1]", "shrink 1"]
    sized.gates[1].set()
    while not sized.asked:  # the one that is ended is the first to answer
        time.sleep(0.001)
    sized.gates[0].set()
    assert first.result(60.0).tokens.tolist() == [7, 8, 9, 10, 11] and second.result(60.0).tokens.tolist() == [7]
    assert [replica for replica, _, _ in sized.asked].count(1) == 1 and not fleet.deaths
    keys = sorted(key for replica, asked, _ in sized.asked if replica == 0 for key in asked)
    assert keys == sorted([7, 8, 9, 7, *([10, 11] if rows is None else [11])])  # what it parts is not sampled again
    assert fleet.sleep() == 0


def test_engines_that_do_not_start_leave_the_others_serving(loop: EventLoop) -> None:
    sized = Sized(2)
    fleet = fleet_of(sized, loop, 2)
    sized.error = EngineFailed("engine-3: start: no memory")
    sized.error.details = "a traceback"
    with pytest.raises(CorerlError) as raised:
        resize(fleet, 4)
    assert raised.value.message == (
        "the engines stay 2 and do not become 4, since not all of engine-2, engine-3 have started: "
        "engine-3: start: no memory"
    )
    assert raised.value.details == "a traceback"
    assert fleet.names == ("engine-0", "engine-1") and not fleet.deaths
    assert sample(fleet, REQUEST).tokens.tolist() == [7, 8, 9, 10, 11]
    sized.error = None
    resize(fleet, 3)
    assert len(fleet) == 3


def test_resizing_raises_the_failure_that_ended_all_engines(loop: EventLoop) -> None:
    sized = Sized(1, lambda request: EngineFailed("engine-0: generate: out of memory"))
    fleet = fleet_of(sized, loop, 1)
    with pytest.raises(EngineFailed, match="out of memory"):
        sample(fleet, REQUEST)
    sized.error = WorkerDied("engine-0 and its group have ended; grow can no longer be called")
    with pytest.raises(EngineFailed, match="^engine-0: generate: out of memory$"):
        resize(fleet, 2)


def test_engines_of_lost_machines_get_other_slots(loop: EventLoop) -> None:
    sized = Sized(3)
    fleet = fleet_of(sized, loop, 3)
    expected = sample(fleet, REQUEST)
    moved = [evolve(each, context=evolve(each.context, devices=("7",))) for each in assigned(2)]
    fleet.reassign(moved, range(2))
    assert sized.log == ["pause [2]", "close [2]", "shrink 1", "reassign in range(0, 2)"]
    assert fleet.assignments == moved and fleet.names == ("engine-0", "engine-1")
    sized.asked.clear()
    assert same(sample(fleet, REQUEST), expected)
    assert sorted(replica for replica, _, _ in sized.asked) == [0, 1]
