"""Who is late, hung or waited for: from heartbeats made by hand, and from real ranks; and what calls record."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corerl.cluster import heartbeat
from corerl.cluster.arrangement import arrange
from corerl.cluster.group import RayGroup
from corerl.cluster.heartbeat import (
    CallRecord,
    Heartbeat,
    Member,
    Pending,
    Recorder,
    Watching,
    end_hung,
    late,
    late_call,
    listed,
    sentence,
)
from corerl.cluster.placement import reserved
from corerl.cluster.runtime import ray_session
from corerl.plugin.events import Span
from tests.cluster.ranks import RAYS_OWN
from tests.machine import paced
from tests.observability.run import Clock

COLLECTIVE = Heartbeat(phase="load", place="loading.py:3 in load", waits=True, collectives={"world": 2})
BUILDING = Heartbeat(phase="model build", place="model.py:7 in build", collectives={"world": 1})


def at(collectives: dict[str, int], *, waits: bool = False, phase: str = "", **more: Any) -> Heartbeat:
    return Heartbeat(phase=phase, place="step.py:1 in train", waits=waits, collectives=collectives, **more)


def ranks_at(*beats: Heartbeat | None) -> list[Member]:
    """Ranks with these heartbeats; None: it is silent."""
    return [
        Member(f"actor rank {rank}", last=beat or COLLECTIVE, missed=3 * (beat is None))
        for rank, beat in enumerate(beats)
    ]


# ---- who is waited for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beats", "awaited"),
    [
        # It has begun fewer collectives and is in none.
        ([at({"all": 4}, waits=True), at({"all": 3}), at({"all": 4}, waits=True)], [1]),
        # Shards of [0, 1] and [2, 3], then replicas [0, 2] and [1, 3]: 3 is late, 2 waits for it, and 0 waits for 2.
        (
            [
                at({"s01": 1, "r02": 1}, waits=True),
                at({"s01": 1, "r13": 1}, waits=True),
                at({"s23": 1, "r02": 0}, waits=True),
                at({"s23": 0, "r13": 0}),
            ],
            [3],
        ),
        # As NCCL has it: nobody's stack is in a collective, the counts alone tell.
        ([at({"s01": 1, "r02": 1}), at({"s01": 1, "r13": 1}), at({"s23": 1, "r02": 0}), at({"s23": 0, "r13": 0})], [3]),
        ([at({}, waits=True), at({}), at({}, waits=True)], [1]),  # counts do not tell
        ([at({"all": 4}, waits=True), None], [1]),  # silent
        ([at({"all": 4}), at({"all": 4})], []),  # all are at work
    ],
)
def test_the_rank_that_the_others_wait_for_is_late(beats: list[Heartbeat | None], awaited: list[int]) -> None:
    assert [member.name for member in late(ranks_at(*beats))] == [f"actor rank {rank}" for rank in awaited]


def test_the_sentence_names_late_waiting_silent_and_done_members() -> None:
    waiting = ranks_at(at({"all": 1}, waits=True, phase="load"), at({"all": 0}, phase="model build"))
    done = [Member(f"actor rank {rank}") for rank in (2, 3, 4, 6)]
    assert sentence("init", 75.4, waiting, done) == (
        "init has taken 75 s: actor rank 1 is in 'model build' (step.py:1 in train); actor rank 0 is waiting for it in "
        "'load'; actor ranks 2-4, 6 are done"
    )
    engine = Member("engine-0", last=at({}))
    text = sentence("generate", 60.0, [engine], counts={engine: (3, 10)})
    assert text == "generate has taken 60 s: engine-0 is at work (step.py:1 in train), with 3 of 10 samples done"
    (silent,) = ranks_at(None)
    assert sentence("start", 60.0, [silent, Member("actor rank 1")]) == (
        "start has taken 60 s: actor rank 0 (pid 0) sends no heartbeat: SIGSTOP, debugger, swapping, or native code "
        "holding the GIL; actor rank 1 has not sent a heartbeat yet: its process is starting"
    )
    text = sentence("init", 60.0, ranks_at(*[at({}, phase="load")] * 100))
    assert text.count("is in 'load'") == 8 and text.endswith("; 92 more, not listed")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["actor rank 5", "actor rank 0", "actor rank 1", "actor rank 2"], "actor ranks 0-2, 5"),
        (["actor rank 3"], "actor rank 3"),
        (["engine-0", "engine-1"], "engine-0, engine-1"),
        (["actor rank 0", "critic rank 0"], "actor rank 0, critic rank 0"),
    ],
)
def test_ranks_of_one_role_are_listed_as_ranges(names: list[str], text: str) -> None:
    assert listed([Member(name) for name in names]) == text


# ---- when a call is late ---------------------------------------------------------------------------------------------


def spoken(*looks: tuple[float, Heartbeat]) -> list[bool]:
    """Whether the watchdog, of 10 s, speaks at each of these looks at a call."""
    member = Member("engine-0")
    call = Pending("generate", 7, {0: member}, ())
    found = []
    for _, beat in looks:
        member.receive(beat)
        found.append(bool(list(late_call(call, [0], 10.0))))
    return found


def looked(seconds: float, moved: bool = False, done: int | None = None) -> tuple[float, Heartbeat]:
    counts = {} if done is None else {7: (done, 10)}
    return seconds, at({}, moved=moved, calls={7: seconds}, counts=counts)


@pytest.mark.parametrize(
    ("looks", "texts"),
    [
        ([looked(9.0), looked(11.0), looked(13.0), looked(23.0)], [False, True, False, True]),  # then after twice 11
        ([looked(9.0), looked(11.0, moved=True), looked(21.0), looked(23.0)], [False, False, False, True]),
        # One that counts may move all the time and still end nothing.
        ([looked(9.0, done=0), looked(11.0, moved=True, done=0)], [False, True]),
        ([looked(11.0, done=1), looked(23.0, moved=True, done=1), looked(47.0, done=2)], [False, True, False]),
    ],
)
def test_the_watchdog_speaks_of_a_call_that_does_not_move(looks: list[Any], texts: list[bool]) -> None:
    assert spoken(*looks) == texts


# ---- who is ended ----------------------------------------------------------------------------------------------------

WATCHING = Watching(health_timeout=16.0, start_timeout=48.0)  # a heartbeat every two seconds


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Member], Watching], dict[str, str]]:
    """ended(members, watching) gives the beginning of why each is ended that is, by name."""
    monkeypatch.setattr(heartbeat.ray, "kill", lambda actor, no_restart: None)

    def ended(members: list[Member], watching: Watching = WATCHING) -> dict[str, str]:
        end_hung(members, watching)
        return {member.name: " ".join(member.killed.split()[:2]) for member in members if member.killed}

    return ended


def test_a_process_without_heartbeats_for_the_limit_is_hung(ended: Any) -> None:
    members = [Member("engine-0", started=True, missed=7), Member("engine-1", started=True, missed=8)]
    assert ended(members, Watching(start_timeout=48.0)) == {}
    assert ended(members) == {"engine-1": "no heartbeat"}
    assert members[1].killed == (
        "no heartbeat for 16 s (cluster.health_timeout): SIGSTOP, debugger, swapping, or native code holding the GIL"
    )


@pytest.mark.parametrize(
    ("beats", "found"),
    [
        ([COLLECTIVE, BUILDING, COLLECTIVE], [1]),  # the one that the others wait for
        ([COLLECTIVE, None, COLLECTIVE], [1]),
        ([BUILDING, BUILDING], [0, 1]),  # nobody waits
        ([COLLECTIVE], []),  # it waits for one that has started
    ],
)
def test_an_overdue_start_ends_the_rank_that_others_wait_for(beats: Any, found: list[int], ended: Any) -> None:
    members = ranks_at(*beats)
    for member in members:
        member.starting = 23
    assert ended(members) == {}
    for member in members:
        member.starting = 24
    assert ended(members) == {f"actor rank {rank}": "not started" for rank in found}


def test_a_process_has_started_once_it_reports_no_phase() -> None:
    member = Member("engine-0")
    member.receive(BUILDING)
    assert not member.started
    member.missed = 3
    member.receive(Heartbeat())
    assert (member.started, member.missed, member.beat) == (True, 0, Heartbeat())


def test_heartbeats_missed_in_a_start_do_not_count_after_it(ended: Any) -> None:
    member = Member("engine-0", missed=8)  # its imports hold the GIL for long
    assert ended([member]) == {} and member.silent
    member.note_started()
    assert ended([member]) == {} and member.started and not member.silent
    member.missed = 8
    member.note_started()  # of a later result
    assert ended([member]) == {"engine-0": "no heartbeat"}


def test_a_notify_that_raises_does_not_end_the_heartbeats(capfd: pytest.CaptureFixture[str]) -> None:
    def notify(text: str) -> None:
        raise BrokenPipeError("nobody reads")

    watched = heartbeat.Heartbeats(Watching(notify=notify), [])
    watched._notify("train has taken 60 s")
    assert capfd.readouterr().err == (
        "corerl: note: train has taken 60 s (and notify raised BrokenPipeError: nobody reads)\n"
    )
    watched.stop()


def test_nobody_is_asked_once_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    there, looked = [True, True, False], list[int]()
    monkeypatch.setattr(heartbeat.ray, "is_initialized", lambda: there.pop(0))
    monkeypatch.setattr(heartbeat.Heartbeats, "_late_calls", lambda _: looked.append(len(there)) or ())
    before = {*threading.enumerate()}
    heartbeat.Heartbeats(Watching(watchdog=0.01), [])
    for thread in {*threading.enumerate()} - before:
        thread.join(paced(20.0))
        assert not thread.is_alive()
    assert (there, looked) == ([], [2, 1])


# ---- what calls record -----------------------------------------------------------------------------------------------

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"


def span(name: str, started: float, ended: float) -> Span:
    return Span(name=name, started=started, ended=ended)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(clock=clock)


def test_spans_come_outer_ones_first_with_their_times(recorder: Recorder, clock: Clock) -> None:
    recorder.start(0)
    with recorder("outer"):
        clock.now = 1.0
        with recorder("first"):
            clock.now = 2.0
        with recorder("second"), recorder("inside, as long"):
            clock.now = 5.0
        clock.now = 6.0
    failing = recorder("fails")
    failing.__enter__()
    clock.now = 7.0
    assert not failing.__exit__(KeyError, KeyError(), None)  # it goes on being raised
    call, ended = recorder.end()
    assert ended == 7.0
    assert call.spans == [
        span("outer", 0.0, 6.0),
        span("first", 1.0, 2.0),
        span("second", 2.0, 5.0),
        span("inside, as long", 2.0, 5.0),
        span("fails", 6.0, 7.0),
    ]


def test_a_span_that_outlives_its_call_is_dropped(recorder: Recorder, clock: Clock) -> None:
    with recorder("outside any call"):
        clock.now = 1.0
    recorder.start(0)
    late = recorder("ends late")
    late.__enter__()
    assert recorder.end()[0].spans == []
    clock.now = 2.0
    recorder.start(1)
    late.__exit__(None, None, None)
    with recorder("its own"):
        clock.now = 3.0
    assert recorder.end()[0].spans == [span("its own", 2.0, 3.0)]


def test_the_oldest_of_several_calls_is_reported(recorder: Recorder, clock: Clock) -> None:
    entered, leave = threading.Event(), threading.Event()
    found: list[CallRecord] = []

    def other() -> None:
        recorder.start(5)
        with recorder("other"):
            entered.set()
            leave.wait(timeout=paced(60.0))
        found.append(recorder.end()[0])

    recorder.start(4)
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(timeout=paced(60.0))
    clock.now = 4.0
    with recorder("mine"):
        clock.now = 5.0
    beat = recorder.heartbeat("", {thread.ident or 0: (2, 8)})
    assert (beat.calls, beat.counts, beat.moved) == ({4: 5.0, 5: 5.0}, {5: (2, 8)}, True)
    beats = [recorder.heartbeat("", {}) for _ in range(2)]  # from one line
    assert [beat.moved for beat in beats] == [True, False]
    assert re.fullmatch(r"cluster/test_heartbeat.py:\d+ in test_the_oldest_of_several_calls_is_reported", beat.place)
    mine = recorder.end()[0]
    recorder.start(6)
    assert recorder.end()[0].lane == 0  # it is free again
    leave.set()
    thread.join()
    assert (mine.lane, found[0].lane) == (0, 1)
    assert (mine.spans, found[0].spans) == ([span("mine", 4.0, 5.0)], [span("other", 0.0, 5.0)])


def frames_in(file: str, name: str, inside: Callable[[], Any]) -> Any:
    """What `inside` gives where a function of that name in that file calls it."""
    space: dict[str, Any] = {}
    exec(compile(f"def {name}(inside):\n    return inside()\n", file, "exec"), space)
    return space[name](inside)


def test_a_wait_lasts_until_the_sample_that_sees_something_else() -> None:
    here = sys._getframe
    gather, reduce = (frames_in(C10D, name, here) for name in ("all_gather", "all_reduce"))
    call = CallRecord(0, 0, 0.0)
    for now, frame in enumerate([None, gather, gather, reduce, None, None, reduce]):
        call.sample(frame, float(now))
    call.sample(None, 6.5)  # the call's end
    assert call.waits == [span("all_gather", 1.0, 3.0), span("all_reduce", 3.0, 4.0), span("all_reduce", 6.0, 6.5)]


def test_a_traced_call_is_sampled_while_it_waits() -> None:
    samples: list[float] = []  # while it waits

    def clock() -> float:
        now = time.time()
        if samples:
            samples.append(now)
        return now

    code = "def barrier(samples, sleep, now):\n    samples.append(now)\n    while len(samples) < 4: sleep(0.001)\n"
    space: dict[str, Any] = {}
    exec(compile(code, C10D, "exec"), space)
    recorder = Recorder(traced=True, clock=clock)
    recorder.start(0)
    space["barrier"](samples, time.sleep, time.time())
    call, ended = recorder.end()
    (wait,) = call.waits
    assert wait.name == "barrier"
    assert call.started <= wait.started <= samples[2] and samples[3] <= wait.ended <= ended


# ---- real ranks ------------------------------------------------------------------------------------------------------


class Reports:
    """What the watchdog says. Whoever is held up is let go once it is named, so that the calls below end only then."""

    def __init__(self, gate: Path) -> None:
        self.gate = str(gate)
        os.mkfifo(gate)
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if " in hold)" in text:
            with open(self.gate, "w"):
                pass

    def of(self, method: str) -> str:
        """The last that was said of a call."""
        return [text for text in self.texts if text.startswith(f"{method} has taken ")][-1]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return Reports(tmp_path_factory.mktemp("gates") / "gate")


@pytest.fixture(scope="module")
def ranks(reports: Reports, shared_ray: None) -> Iterator[RayGroup]:
    """Four that have met; the last was held up while it built its model."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    names = [f"actor rank {rank}" for rank in range(4)]
    watching = Watching(notify=reports, watchdog=1.0)
    with ray_session(address="", cpus=4), reserved(arrange({"ranks": 4}), timeout=paced(60.0)) as slots:
        group = RayGroup(names, "tests.cluster.ranks:Rank", slots["ranks"], environment, watching=watching)
        host, port, listening = group.listen(0)
        group.wait(group.construct([(rank, 4) for rank in range(4)]))
        meeting = [
            (host, port, listening if rank == 0 else None, reports.gate if rank == 3 else "") for rank in range(4)
        ]
        group.wait(group.start_each("init", meeting))
        yield group
        group.kill()


@pytest.mark.processes
def test_ranks_of_one_machine_talk_over_its_loopback_interface(ranks: RayGroup) -> None:
    assert ranks.call("hosts") == [["127.0.0.1", RAYS_OWN]] * 4


@pytest.mark.processes
def test_real_ranks_that_others_wait_for_are_named(ranks: RayGroup, reports: Reports) -> None:
    assert re.fullmatch(
        r"init has taken \d+ s: actor rank 3 is in 'model build' \(cluster/ranks\.py:\d+ in hold\); "
        r"actor ranks 0-2 are waiting for it in 'load'",
        reports.of("init"),
    )
    assert ranks.wait(ranks.start_each("train", [(reports.gate,), ("",), ("",), ("",)], at="step 3")) == [10.0] * 4
    assert re.fullmatch(
        r"train at step 3 has taken \d+ s: actor rank 0 is at work \(cluster/ranks\.py:\d+ in hold\); "
        r"actor ranks 1-3 are waiting for it",
        reports.of("train at step 3"),
    )
    # Through a chain of groups.
    assert ranks.wait(ranks.start_each("pairs", [("",), ("",), (reports.gate,), ("",)])) == [10.0] * 4
    assert re.fullmatch(
        r"pairs has taken \d+ s: actor rank 2 is at work \(cluster/ranks\.py:\d+ in hold\); "
        r"actor ranks 0-1, 3 are waiting for it",
        reports.of("pairs"),
    )
