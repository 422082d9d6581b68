"""trace.json, read as it grows: what is in a window of time, and what each process did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corerl_page.runs import Tail
from corerl_page.timeline import Timeline

SECOND = 1_000_000
NAMES = [(1, "driver", 2, "phases"), (3, "actor rank 0", 4, "calls"), (5, "idle", 6, "ranks")]


def call(start: float, end: float, name: str, **more: Any) -> dict[str, Any]:
    begin = round(start * SECOND)
    when = {"ts": begin, "dur": round(end * SECOND) - begin}
    return {"ph": "X", "pid": 3, "tid": 4, "name": name, "cat": "call", **when, **more}


RECORDS = [
    *({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name, _, _ in NAMES),
    *(
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        for pid, _, tid, track in NAMES
    ),
    {"ph": "B", "ts": 100 * SECOND, "pid": 1, "tid": 2, "name": "rollout", "args": {"step": 7}},
    {"ph": "E", "ts": 104 * SECOND, "pid": 1, "tid": 2, "name": "rollout"},
    call(101, 103, "train", args={"call": "train at optimizer step 3"}),
    {"ph": "X", "ts": 101 * SECOND, "pid": 3, "tid": 4, "name": "micro-batch", "cat": "span", "dur": SECOND},
    call(103, 104, "sleep"),
    {"ph": "X", "ts": 104 * SECOND, "pid": 5, "tid": 6, "name": "samples", "cat": "idle", "dur": 2 * SECOND},
    call(106, 107, "wake_up"),
    call(107, 110, "save", args={"call": "save", "error": "no room"}),
]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("[\n" + "".join(json.dumps(each) + ",\n" for each in records))


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    path = tmp_path / "trace.json"
    write(path, RECORDS)
    return Timeline(Tail(path))


def test_a_window_has_the_slices_that_reach_into_it(timeline: Timeline) -> None:
    whole = timeline.window(None, None, width=1000)
    assert (whole["from"], whole["to"], whole["of"]) == (0, 10 * SECOND, 10 * SECOND)
    found = {(track["process"], track["track"]): track["slices"] for track in whole["tracks"]}
    assert [(each["name"], each["start"], each["end"]) for each in found["actor rank 0", "calls"]] == [
        ("train", 1 * SECOND, 3 * SECOND),
        ("sleep", 3 * SECOND, 4 * SECOND),
        ("wake_up", 6 * SECOND, 7 * SECOND),
        ("save", 7 * SECOND, 10 * SECOND),
    ]
    assert [each["name"] for each in found["actor rank 0", "calls, parts"]] == ["micro-batch"]
    assert [(each["start"], each["end"]) for each in found["actor rank 0", "memory"]] == [(4 * SECOND, 7 * SECOND)]
    assert [each["detail"] for each in found["driver", "phases"]] == ["step 7"]
    part = timeline.window(round(4.5 * SECOND), round(6.5 * SECOND), width=1000)
    names = {track["track"]: [each["name"] for each in track["slices"]] for track in part["tracks"]}
    assert names["calls"] == ["wake_up"]


def test_slices_too_short_to_see_are_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [*RECORDS[:6], *(call(100 + at / 1000, 100 + (at + 0.5) / 1000, "generate") for at in range(1000))])
    found = Timeline(Tail(path)).window(None, None, width=10)
    slices = next(track["slices"] for track in found["tracks"] if track["track"] == "calls")
    assert sum(each["count"] for each in slices) == 1000
    assert len(slices) <= 10


def test_processes_are_summed_up(timeline: Timeline) -> None:
    (rank,) = timeline.processes()
    assert rank["process"] == "actor rank 0"
    assert rank["state"] == "failed"
    assert (rank["busy"], rank["seconds"]) == (pytest.approx(7.0), pytest.approx(9.0))
    assert rank["idle"] == {"samples": 2.0}
    assert rank["errors"] == ["save error: no room"]


def test_calls_at_the_same_time_are_summed_up_together(tmp_path: Path) -> None:
    path, second = tmp_path / "trace.json", {"ph": "M", "name": "thread_name", "pid": 3, "tid": 7}
    late = call(102, 112, "receive", args={"call": "receive", "error": "full"}) | {"tid": 7}
    write(path, [*RECORDS[:6], {**second, "args": {"name": "calls 2"}}, call(101, 103, "generate"), late])
    (engine,) = Timeline(Tail(path)).processes()
    assert (engine["calls"], engine["state"], engine["last"]) == (2, "failed", "receive error: full")
    assert (engine["busy"], engine["errors"]) == (11.0, ["receive error: full"])


def test_a_file_that_grows_is_read_on(timeline: Timeline, tmp_path: Path) -> None:
    timeline.window(None, None, width=100)
    with (tmp_path / "trace.json").open("a") as file:
        file.write(json.dumps(call(110, 112, "shutdown")) + ",\n" + '{"ph": "X", "ts"')
    assert timeline.window(None, None, width=100)["of"] == 12 * SECOND
    assert timeline.processes()[0]["state"] == "ended"
