"""Several engines seen as one, with processes that answer as a test says; real ones are in tests/end_to_end."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import ModelConfig
from corerl.engines.base import CacheUse, EngineContext, GenerateRequest, Generation, PromptScores, SamplingParams
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineAssignment, EngineService
from corerl.errors import CorerlError, EngineFailed, VersionGone, WeightUpdateError, WorkerDied
from corerl.event_loop import EventLoop
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind, load
from tests.engines.services import generation_of, serve

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
def loop() -> Iterator[EventLoop]:
    made = EventLoop("tested")
    yield made
    made.close()


def test_an_engine_has_a_receiver_per_rank(loop: EventLoop) -> None:
    assignments = assigned(2, bundles=2)
    fleet = EngineFleet([], assignments, loop)  # type: ignore[arg-type]  # no process is asked
    assert fleet.receivers == ("engine-0", "engine-0", "engine-1", "engine-1")
    assert [list(each.context.receivers) for each in assignments] == [[0, 1], [2, 3]]


class Group:
    """Processes that answer any call with `answers`, by replica; whoever waits for another one waits in vain."""

    def __init__(self, answers: Mapping[int, Any], *, failing_starts: int = 0) -> None:
        self._answers = answers
        self._failing_starts = failing_starts
        self.log: list[str] = []

    def construct(self, arguments: Any) -> list[int]:
        return list(self._answers)

    def start(self, method: str) -> list[int]:
        self.log.append(method)
        return []

    def start_some(self, method: str, arguments: Any) -> list[int]:
        return list(arguments)

    def ready(self, pending: Any, timeout: float) -> bool:
        return True

    def answers(self, pending: list[int], *, timeout: float | None = None, on_counts: Any = None) -> dict[int, Any]:
        if timeout is not None:
            assert timeout < 3600
            return {replica: each for replica, each in self._answers.items() if isinstance(each, CorerlError)}
        self.log.append("wait for all")
        assert self._answers.keys() >= set(pending), "waited for in vain"
        return {replica: self._answers[replica] for replica in pending}

    def replace(self, replica: int, arguments: Any) -> None:
        self.log.append(f"replace {replica}")
        if len(self.log) <= self._failing_starts:
            raise EngineFailed("engine-0: start: no memory")

    def kill(self) -> None:
        self.log.append("kill")


def fleet_of(processes: Any, loop: EventLoop, replicas: int, **settings: Any) -> EngineFleet:
    """On as much of a group of processes as is asked."""
    fleet = EngineFleet(processes, assigned(replicas), loop, **settings)
    fleet.updated(fleet.names)
    return fleet


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


def test_caches_are_asked_of_the_engines_that_serve(loop: EventLoop) -> None:
    use = CacheUse(capacity=100, tokens=30, retracted=1)
    fleet = fleet_of(Group({0: use, 1: None, 2: "not asked"}), loop, 3, restarts=1)
    fleet.leave_out({"engine-2": WeightUpdateError("no answer")})
    fleet.updated(["engine-0", "engine-1"])
    assert loop.run(fleet.cache_use()) == {"engine-0": use}  # the engine of the other one cannot say
    with fleet.replacing():
        assert loop.run(fleet.cache_use()) == {}


class Counting:
    """Two processes that draw; of the second one, nothing is known at first."""

    def __init__(self) -> None:
        self.answered: list[int] = []  # rows of each
        self.turn = threading.Condition()

    def start_some(self, method: str, arguments: dict[int, Any]) -> dict[int, Any]:
        return arguments

    def answers(self, pending: dict[int, Any], *, on_counts: Any) -> dict[int, Any]:
        ((replica, (request,)),) = pending.items()
        with self.turn:  # one replica after the other
            assert self.turn.wait_for(lambda: replica == len(self.answered), 60.0)
            for rows in (1, 2) if replica == 0 else (None, 1):
                on_counts({replica: rows})
            self.answered.append(len(request))
            self.turn.notify_all()
        return {replica: generation_of([[2]] * len(request))}


def test_the_rows_that_have_ended_are_counted_over_all_replicas(loop: EventLoop) -> None:
    counting = Counting()
    fleet = fleet_of(counting, loop, 2)
    counts: list[tuple[int, int]] = []
    loop.run(fleet.generate(REQUEST, on_progress=lambda done, of: counts.append((done, of))))
    assert counting.answered == [3, 2] and sorted(counts) == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_the_process_of_an_engine_counts_each_request_by_itself(tmp_path: Path) -> None:
    service = EngineService(assigned(1)[0])
    seen: list[dict[int, tuple[int, int]]] = []

    class Draws:
        def generate(self, request: GenerateRequest, on_finished: Any) -> Generation:
            on_finished(2)
            if len(request) == 5:
                other = threading.Thread(target=service.generate, args=(request.row_range(0, 3),))
                other.start()
                other.join()
            on_finished(1)
            seen.append(dict(service.counts()))
            return Generation.nothing(request)

    service.engine = Draws()  # type: ignore[assignment]  # as much of an engine as is asked
    service.generate(REQUEST)
    own = threading.get_ident()
    inner, outer = seen
    assert sorted(inner.values()) == [(2, 5), (3, 3)] and inner[own] == (2, 5)
    assert outer == {own: (3, 5)}
    assert service.counts() == {}


def test_failed_starts_are_repeated_up_to_the_restarts(loop: EventLoop) -> None:
    died = {"engine-0": WorkerDied("engine-0: its process died")}
    late = Group({0: 8}, failing_starts=2)
    fleet = fleet_of(late, loop, 1, restarts=3)
    fleet.leave_out(died)
    fleet.replace(died)
    assert late.log == ["replace 0"] * 3
    assert not fleet.dead and fleet.sleep() == 8
    never = Group({0: 8}, failing_starts=9)
    with pytest.raises(EngineFailed, match="^engine-0: start: no memory") as raised:
        fleet_of(never, loop, 1, restarts=3).replace(died)
    assert raised.value.__notes__ == ["the engine had already been restarted 3 times (rollout.restarts)"]
    assert never.log == ["replace 0"] * 3 + ["kill"]


def test_an_engine_that_dies_in_its_start_is_replaced(loop: EventLoop) -> None:
    died = WorkerDied("engine-1: its process died during start")
    starting = Group({0: None, 1: died})
    fleet = fleet_of(starting, loop, 2, restarts=1)
    assert fleet.start().result() == {"engine-1": died}
    fleet.replace({"engine-1": died})
    assert starting.log == ["wait for all", "replace 1"] and not fleet.dead and not fleet.all_serve

    starting = Group({0: None, 1: died})
    fleet = fleet_of(starting, loop, 2)
    with pytest.raises(WorkerDied, match="^engine-1: its process died during start$"):
        fleet.replace(fleet.start().result())
    assert starting.log == ["wait for all", "kill"]

    starting = Group({0: None, 1: EngineFailed("engine-1: start: no such model")})
    with pytest.raises(EngineFailed, match="no such model"):
        fleet_of(starting, loop, 2, restarts=1).start().result()
    assert starting.log == ["kill"]


class ReplacedMeanwhile:
    """Two processes. A call finds the second one dead while another takes its place."""

    def __init__(self, loop: EventLoop) -> None:
        self.fleet = fleet_of(self, loop, 2, restarts=1)
        self.starting, self.reported = threading.Event(), threading.Event()

    def start_some(self, method: str, arguments: Any) -> Any:
        return None

    def answers(self, pending: None, *, on_counts: Any) -> dict[int, Any]:
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
    assert not processes.fleet.dead


class Scripted:
    """Replicas that answer a token for each row, its noise key modulo 16, as `script` says: a call is answered with
    what the function at its place makes of the request, later ones in full."""

    def __init__(self, *script: Callable[[GenerateRequest], Any]) -> None:
        self.script = list(script)
        self.asked: list[tuple[int, list[int], list[int]]] = []  # replica, noise keys, tokens of responses so far
        self.log: list[str] = []
        self.paused = threading.Event()
        self._lock = threading.Lock()

    def start_some(self, method: str, arguments: Any) -> Any:
        return method, arguments

    def answers(self, pending: Any, *, timeout: float | None = None, on_counts: Any = None) -> dict[int, Any]:
        method, arguments = pending
        if method != "generate":
            self.log.append(method)
            if method == "pause":
                self.paused.set()
            return dict.fromkeys(arguments, 0)
        ((replica, (request,)),) = arguments.items()
        with self._lock:
            self.asked.append((replica, request.noise_keys.tolist(), request.response_lengths.tolist()))
            next_answer = self.script.pop(0) if self.script else respond
        return {replica: next_answer(request)}

    def replace(self, replica: int, arguments: Any) -> None:
        self.log.append(f"replace {replica}")

    def kill(self) -> None:
        self.log.append("kill")


def respond(request: GenerateRequest, rows: int | None = None) -> Generation:
    """The first `rows` rows in full, the others not at all."""
    whole = np.arange(len(request)) < (len(request) if rows is None else rows)
    tokens = [[key % 16] if done else [] for key, done in zip(request.noise_keys.tolist(), whole, strict=True)]
    return generation_of(tokens, unfinished=~whole)


def test_unfinished_rows_without_a_pause_are_a_failure(loop: EventLoop) -> None:
    scripted = Scripted(functools.partial(respond, rows=2))
    fleet = fleet_of(scripted, loop, 1)
    with pytest.raises(EngineFailed, match="^3 of 5 responses came back unfinished, but the engines were not paused"):
        sample(fleet, REQUEST)


def test_a_version_is_sampled_where_it_is_held_or_nowhere(loop: EventLoop) -> None:
    sampling = threading.Event()

    def of_version(request: GenerateRequest) -> Generation:
        answer = respond(request)
        return evolve(answer, versions=answer.versions + (6 if request.version is None else request.version))

    def interrupted(request: GenerateRequest) -> Generation:
        sampling.set()
        assert scripted.paused.wait(60.0)
        answer = respond(request, rows=2)
        return evolve(answer, versions=answer.versions + 5)

    scripted = Scripted(of_version, of_version, of_version, interrupted, of_version, of_version)
    fleet = fleet_of(scripted, loop, 2)
    fleet.updated(fleet.names, {"engine-0": (6,), "engine-1": (5, 6)})  # the first one is new
    assert fleet.held == (6,)
    assert set(sample(fleet, evolve(REQUEST, version=5)).versions) == {5}
    assert [replica for replica, _, _ in scripted.asked] == [1]
    assert set(sample(fleet, evolve(REQUEST, version=6)).versions) == {6}  # over both
    goes_on = loop.begin(fleet.generate(evolve(REQUEST, version=5)))
    assert sampling.wait(60.0)
    waits = loop.begin(fleet.generate(evolve(REQUEST, version=5)))
    loop.run(fleet.pause())
    fleet.updated(fleet.names, {"engine-0": (6, 7), "engine-1": (6, 7)})
    assert fleet.held == (6, 7)
    loop.run(fleet.resume())
    for work in (goes_on, waits, loop.begin(fleet.generate(evolve(REQUEST, version=5)))):
        with pytest.raises(VersionGone, match="no engine holds weights version 5 any more, but 6, 7"):
            work.result(60.0)
    assert "kill" not in scripted.log
    fleet.updated(fleet.names, {"engine-0": (6, 7), "engine-1": (6, 7)})
    assert set(sample(fleet, evolve(REQUEST, version=7)).versions) == {7}


def test_scored_prompts_are_read_whole_after_a_pause(loop: EventLoop) -> None:
    sampling, scored = threading.Event(), evolve(REQUEST, params=evolve(REQUEST.params, scored=3, scored_top=2))

    def scores(request: GenerateRequest) -> PromptScores:
        unknown = PromptScores.unknown(len(request.tokens), request.params)
        return evolve(unknown, logprobs=-request.tokens.astype(np.float32))

    def interrupted(request: GenerateRequest) -> Generation:
        sampling.set()
        assert scripted.paused.wait(60.0)
        return evolve(respond(request, rows=2), scores=PromptScores.unknown(len(request.tokens), request.params))

    def whole(request: GenerateRequest) -> Generation:
        return evolve(respond(request), scores=scores(request))

    scripted = Scripted(interrupted, whole)
    fleet = fleet_of(scripted, loop, 1)
    work = loop.begin(fleet.generate(scored))
    assert sampling.wait(60.0)
    loop.run(fleet.pause())
    loop.run(fleet.resume())
    found = work.result(60.0)
    assert found.tokens.tolist() == [7, 8, 9, 10, 11]
    assert found.scores is not None and found.scores.logprobs.tolist() == [-token for token in range(10)]
    with pytest.raises(EngineFailed, match="engine-0 was asked for log-probs of prompts, and its engine reports none"):
        sample(fleet, scored)


def test_an_engine_that_samples_from_other_weights_than_asked_is_an_error(loop: EventLoop) -> None:
    fleet = fleet_of(Scripted(), loop, 1)  # tokens of version 0
    fleet.updated(fleet.names, {"engine-0": (0, 1)})
    with pytest.raises(EngineFailed, match=r"engine-0 sampled from weights version \{0\}, but was asked for version 1"):
        sample(fleet, evolve(REQUEST, version=1))


def test_if_all_engines_die_new_ones_sample_the_same(loop: EventLoop) -> None:
    def dies(request: GenerateRequest) -> WorkerDied:
        return WorkerDied("its process died")

    scripted = Scripted(dies, dies)
    fleet = fleet_of(scripted, loop, 2, restarts=1)
    served: list[bool] = []

    def ensure() -> None:
        assert list(fleet.died) == ["engine-0", "engine-1"]
        fleet.replace(fleet.died)
        served.append(fleet.all_serve)
        fleet.updated(fleet.names)

    assert serve(fleet, fleet.generate(REQUEST), ensure).tokens.tolist() == [7, 8, 9, 10, 11]
    assert served == [False] and scripted.log == ["replace 0", "replace 1"]
    keys = [key for _, asked, _ in scripted.asked[2:] for key in asked]
    assert sorted(keys) == REQUEST.noise_keys.tolist()

    def interrupts() -> None:
        raise KeyboardInterrupt

    fleet.updated([])
    with pytest.raises(KeyboardInterrupt):
        serve(fleet, fleet.generate(REQUEST), interrupts)


def test_what_nobody_waits_for_any_more_is_interrupted(loop: EventLoop) -> None:
    sized = Sized(1, lambda request: respond(request, rows=0))
    sized.gates[0] = threading.Event()
    fleet = fleet_of(sized, loop, 1)
    given_up = loop.begin(fleet.generate(REQUEST))
    assert sized.sampling.acquire(timeout=60.0)
    given_up.cancel()
    resetting = loop.begin(fleet.reset())
    assert sized.paused.wait(60.0)
    assert not resetting.done()  # until nothing is sampled
    sized.gates.pop(0).set()
    resetting.result(60.0)
    assert sized.log == ["pause", "resume"] and len(sized.asked) == 1
    assert loop.run(fleet.generate(REQUEST)).tokens.tolist() == [7, 8, 9, 10, 11]
    loop.run(fleet.pause())
    loop.run(fleet.reset())  # whoever paused is gone
    assert loop.run(fleet.generate(REQUEST)).tokens.tolist() == [7, 8, 9, 10, 11]


class Sized(Scripted):
    """As many replicas as are wanted, in slots that are their numbers. `gates` hold up calls of some."""

    def __init__(self, size: int, *script: Callable[[GenerateRequest], Any]) -> None:
        super().__init__(*script)
        self.size = size
        self.gates: dict[int, threading.Event] = {}
        self.sampling = threading.Semaphore(0)  # calls that a gate has held up
        self.error: CorerlError | None = None  # of the next start

    def start_some(self, method: str, arguments: Any) -> Any:
        assert all(replica < self.size for replica in arguments), "one that is not there is asked"
        return method, arguments

    def answers(self, pending: Any, *, timeout: float | None = None, on_counts: Any = None) -> dict[int, Any]:
        method, arguments = pending
        if method == "generate":
            for gate in [gate for replica, gate in self.gates.items() if replica in arguments]:
                self.sampling.release()
                assert gate.wait(60.0)
        if timeout is None:
            return super().answers(pending) if arguments else {}
        self.log.append(f"{method} {sorted(arguments)}")
        if method == "pause":
            self.paused.set()
        return dict.fromkeys(arguments)

    def grow(self, names: Any, slots: Any, arguments: Any) -> None:
        self.log.append(f"grow {names} in {slots}")
        assert [assignment.context.name for (assignment,) in arguments] == names
        if self.error is not None:
            raise self.error
        self.size += len(names)

    def shrink(self, count: int) -> None:
        self.log.append(f"shrink {count}")
        self.size -= count

    def reassign(self, slots: Sequence[Any]) -> None:
        self.log.append(f"reassign in {slots}")


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
    assert [replica for replica, _, _ in sized.asked].count(1) == 1 and not fleet.died
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
    assert fleet.names == ("engine-0", "engine-1") and not fleet.dead
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


def same(a: Generation, b: Generation) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "offsets", "logprobs", "versions", "truncated")
    )


def sample(fleet: EngineFleet, request: GenerateRequest) -> Generation:
    return fleet.loop.run(fleet.generate(request))


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
