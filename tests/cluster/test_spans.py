"""Spans of calls against a scripted clock, waits in collectives against frames by hand; real ones are in test_group."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from corerl.cluster.spans import CallRecord, Recorder, collective_in
from corerl.plugin.events import Span
from tests.machine import paced
from tests.observability.run import Clock

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"


def span(name: str, started: float, ended: float) -> Span:
    return Span(name=name, started=started, ended=ended)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(clock)


def test_spans_come_outer_ones_first_with_their_times(recorder: Recorder, clock: Clock) -> None:
    recorder.begin()
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
    assert recorder.end(8.0).spans == [
        span("outer", 0.0, 6.0),
        span("first", 1.0, 2.0),
        span("second", 2.0, 5.0),
        span("inside, as long", 2.0, 5.0),
        span("fails", 6.0, 7.0),
    ]


def test_what_ends_after_its_call_belongs_to_no_other(recorder: Recorder, clock: Clock) -> None:
    with recorder("outside any call"):
        clock.now = 1.0
    recorder.begin()
    late = recorder("ends late")
    late.__enter__()
    assert recorder.end(1.5).spans == []
    clock.now = 2.0
    recorder.begin()
    late.__exit__(None, None, None)
    with recorder("its own"):
        clock.now = 3.0
    assert recorder.end(3.0).spans == [span("its own", 2.0, 3.0)]


def test_calls_at_the_same_time_have_lanes_and_spans_of_their_own(recorder: Recorder, clock: Clock) -> None:
    entered, leave = threading.Event(), threading.Event()
    found: dict[str, CallRecord] = {}

    def other() -> None:
        recorder.begin()
        with recorder("other"):
            entered.set()
            leave.wait(timeout=paced(60.0))
        found["other"] = recorder.end(9.0)

    recorder.begin()
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(timeout=paced(60.0))
    clock.now = 4.0
    with recorder("mine"):
        clock.now = 5.0
    mine = recorder.end(5.0)
    recorder.begin()
    assert recorder.end(5.0).lane == 0  # it is free again
    leave.set()
    thread.join()
    assert (mine.lane, found["other"].lane) == (0, 1)
    assert mine.spans == [span("mine", 4.0, 5.0)]
    assert found["other"].spans == [span("other", 0.0, 5.0)]


def frames_in(file: str, name: str, inside: Callable[[], Any]) -> Any:
    """What `inside` gives where a function of that name in that file calls it."""
    code = f"def {name}(inside):\n    return inside()\n"
    space: dict[str, Any] = {}
    exec(compile(code, file, "exec"), space)
    return space[name](inside)


def test_a_thread_is_in_a_collective_where_only_libraries_are_inside_it() -> None:
    here = sys._getframe
    frame = frames_in(C10D, "all_reduce", lambda: frames_in("/x/site-packages/torch/_ops.py", "call", here))
    # The lambda above is this file's, as a user's function called from inside would be.
    assert collective_in(frame) is None
    own = frames_in(C10D, "all_reduce", here)
    found = collective_in(own)
    assert found is not None and found[1] == "all_reduce"
    assert collective_in(sys._getframe()) is None
    assert collective_in(None) is None


def test_each_wait_lasts_from_the_look_that_saw_it_to_the_one_that_saw_something_else() -> None:
    here = sys._getframe
    gather, reduce = (frames_in(C10D, name, here) for name in ("all_gather", "all_reduce"))
    call = CallRecord(0, 0.0)
    for now, frame in enumerate([None, gather, gather, reduce, None, None, reduce]):
        call.look(frame, float(now))
    call.look(None, 6.5)  # the call's end
    assert call.waits == [span("all_gather", 1.0, 3.0), span("all_reduce", 3.0, 4.0), span("all_reduce", 6.0, 6.5)]


def test_a_thread_beside_sees_waits_while_they_go_on() -> None:
    looks: list[float] = []  # while it waits

    def clock() -> float:
        now = time.time()
        if looks:
            looks.append(now)
        return now

    code = "def barrier(looks, sleep, now):\n    looks.append(now)\n    while len(looks) < 4: sleep(0.001)\n"
    space: dict[str, Any] = {}
    exec(compile(code, C10D, "exec"), space)
    recorder = Recorder(clock)
    recorder.begin()
    space["barrier"](looks, time.sleep, time.time())
    call = recorder.end(clock())
    (wait,) = call.waits
    assert wait.name == "barrier"
    assert call.started <= wait.started <= looks[2] and looks[3] <= wait.ended <= looks[-1]
