"""trace.json of a scripted run, value by value, and what any trace must keep to be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corerl.plugin import CallFinished, Idle, NoOptions, Notice, PhaseStarted, RunFinished, Span, StepFinished
from corerl_observe.trace import Trace
from plugins.observe.tests.traces import Slice, arrows, check, names, read, slices
from tests.observability.run import Clock, started

ASKED = 1_800_000_000.0  # a time.time() of these years


def at(seconds: float) -> float:
    return ASKED + seconds


def us(seconds: float) -> int:
    return round(at(seconds) * 1e6)


def span(name: str, begin: float, end: float) -> Span:
    return Span(name=name, started=at(begin), ended=at(end))


def worked(process: str, verb: str, asked: float, begin: float, end: float, **more: Any) -> CallFinished:
    call = more.pop("call", verb)
    return CallFinished(
        process=process, verb=verb, call=call, asked=at(asked), started=at(begin), ended=at(end), **more
    )


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = ASKED
    return clock


@pytest.fixture
def trace(tmp_path: Path, clock: Clock) -> Trace:
    return Trace(options=NoOptions(), run_dir=str(tmp_path), clock=clock)


def run_a_step(trace: Trace, clock: Clock) -> None:
    """The driver trains two ranks, of which the second is late, and sends an engine their weights."""
    trace.observe(started("r"))
    trace.observe(PhaseStarted(name="train", step=3))
    clock.now = at(5.0)
    call = "train at optimizer step 3"
    for rank, begin, busy in ((1, 1.5, 4.0), (0, 1.0, 2.0)):
        spans = (span("micro-batch", begin, busy), span("optimizer", busy, 4.5))
        waits = (span("all_reduce", busy + 0.25, 4.5),) if rank == 0 else ()
        trace.observe(worked(f"actor rank {rank}", "train", 0.5, begin, 4.75, call=call, spans=spans, waits=waits))
    trace.observe(PhaseStarted(name="update_weights", step=4))
    trace.observe(worked("engine-0", "receive", 5.0, 5.5, 6.0, error="it is\nfull"))
    clock.now = at(7.0)
    trace.observe(Notice(text="watch out"))
    trace.observe(RunFinished(reason="finished", steps_done=4, seconds=7.0))


def test_each_process_has_a_row_with_its_calls(trace: Trace, clock: Clock, tmp_path: Path) -> None:
    run_a_step(trace, clock)
    trace.shutdown("finished")
    events = json.loads((tmp_path / "trace.json").read_text())  # a whole file is plain JSON
    check(events)

    call = "train at optimizer step 3"
    assert sorted(slices(events)) == sorted(
        [
            Slice("driver", "phases", "train", us(0.0), us(5.0)),
            Slice("driver", "phases", "update_weights", us(5.0), us(7.0)),
            Slice("driver", "calls", call, us(0.5), us(0.5) + 1),  # one for both ranks
            Slice("driver", "calls", "receive", us(5.0), us(5.0) + 1),
            Slice("actor rank 0", "calls", "train", us(1.0), us(4.75)),
            Slice("actor rank 0", "calls", "micro-batch", us(1.0), us(2.0)),
            Slice("actor rank 0", "calls", "optimizer", us(2.0), us(4.5)),
            Slice("actor rank 0", "collectives", "all_reduce", us(2.25), us(4.5)),
            Slice("actor rank 1", "calls", "train", us(1.5), us(4.75)),
            Slice("actor rank 1", "calls", "micro-batch", us(1.5), us(4.0)),
            Slice("actor rank 1", "calls", "optimizer", us(4.0), us(4.5)),
            Slice("engine-0", "calls", "receive", us(5.5), us(6.0)),
        ]
    )
    assert sorted((a.name, b.process, b.name) for a, b in arrows(events)) == [
        ("receive", "engine-0", "receive"),
        (call, "actor rank 0", "train"),
        (call, "actor rank 1", "train"),
    ]
    details = {event["name"]: event["args"] for event in events if event.get("cat") == "call"}
    assert details == {"train": {"call": call}, "receive": {"call": "receive", "error": r"it is\nfull"}}
    (notice,) = [event for event in events if event["ph"] == "i"]
    assert (notice["name"], notice["ts"], notice["s"]) == ("watch out", us(7.0), "t")


def test_what_processes_wait_for_is_drawn_below_the_driver(trace: Trace, tmp_path: Path) -> None:
    trace.observe(worked("engine-0", "generate", 0.0, 0.0, 4.0))
    waits = [("ranks", "samples", 0.0, 4.0), ("ranks", "driver", 4.0, 4.5), ("engine-0", "training", 4.5, 9.0)]
    idle = [Idle(who=who, waits_for=cause, started=at(began), ended=at(ended)) for who, cause, began, ended in waits]
    trace.observe(StepFinished(step=0, metrics={}, idle=idle))
    trace.observe(StepFinished(step=1, metrics={}))
    trace.shutdown("finished")
    events = json.loads((tmp_path / "trace.json").read_text())
    check(events)
    drawn = [each for each in slices(events) if each.process == "idle"]
    assert drawn == [Slice("idle", who, cause, us(began), us(ended)) for who, cause, began, ended in waits]
    sort = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    order = sorted(sort, key=sort.__getitem__)
    assert [names(events)[pid, None] for pid in order] == ["driver", "idle", "engine-0"]


def test_rows_stand_in_the_order_of_roles_and_ranks(trace: Trace, clock: Clock, tmp_path: Path) -> None:
    for process in ("actor rank 10", "critic rank 0", "engine-1", "actor rank 2", "engine-0"):
        trace.observe(worked(process, "init", 0.0, 1.0, 2.0))
    trace.shutdown("finished")
    events = read(tmp_path / "trace.json")
    sort = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    processes = {pid: name for (pid, tid), name in names(events).items() if tid is None}
    assert [processes[pid] for pid in sorted(processes, key=sort.__getitem__)] == [
        "driver", "actor rank 2", "actor rank 10", "critic rank 0", "engine-0", "engine-1"
    ]  # fmt: skip
    numbers = [*sort, *(tid for _, tid in names(events) if tid is not None)]
    assert len(set(numbers)) == len(numbers)


def test_calls_at_the_same_time_have_their_own_tracks(trace: Trace, tmp_path: Path) -> None:
    trace.observe(worked("engine-0", "pause", 1.0, 1.0, 3.0, lane=1))
    trace.observe(worked("engine-0", "generate", 0.0, 0.5, 2.0))
    trace.shutdown("finished")
    events = read(tmp_path / "trace.json")
    check(events)
    found = {(each.name, each.track) for each in slices(events) if each.process == "engine-0"}
    assert found == {("pause", "calls 2"), ("generate", "calls")}


def test_a_killed_run_leaves_its_events_and_open_phase(trace: Trace, clock: Clock, tmp_path: Path) -> None:
    run_a_step(trace, clock)
    trace.observe(PhaseStarted(name="saving", step=4))
    text = (tmp_path / "trace.json").read_text()
    events = json.loads(text + "]")  # nothing else is missing
    assert (events[-1]["ph"], events[-1]["name"]) == ("B", "saving")
    trace.shutdown("failed")
    closed = json.loads((tmp_path / "trace.json").read_text())
    assert closed[:-1] == events
    assert (closed[-1]["ph"], closed[-1]["name"]) == ("E", "saving")
    check(closed)


def test_a_resumed_run_keeps_the_traces_before_it(tmp_path: Path) -> None:
    for phase in ("first", "second", "third"):
        trace = Trace(options=NoOptions(), run_dir=str(tmp_path / "run"))
        trace.observe(PhaseStarted(name=phase, step=0))
        trace.shutdown("finished")
    files = {path.name: slices(read(path))[0].name for path in (tmp_path / "run").iterdir()}
    assert files == {"trace-1.json": "first", "trace-2.json": "second", "trace.json": "third"}


def test_a_long_run_remembers_only_its_newest_calls(trace: Trace, tmp_path: Path) -> None:
    for step in range(1500):
        for rank in (0, 1):
            trace.observe(worked(f"actor rank {rank}", "train", step, step + 0.25, step + 0.75))
    trace.shutdown("finished")
    assert len(trace._asked) == 1000
    events = read(tmp_path / "trace.json")
    check(events)
    assert sum(each.process == "driver" for each in slices(events)) == 1500
    assert len(arrows(events)) == 3000
