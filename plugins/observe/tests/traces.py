"""Read a trace.json as the Trace Event Format says it is to be read, and hold it to what makes it worth drawing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Events = list[dict[str, Any]]


class Slice(NamedTuple):
    process: str
    track: str
    name: str
    begin: int  # microseconds
    end: int


def read(path: Path) -> Events:
    """The closing bracket may be missing."""
    text = path.read_text()
    events: Events = json.loads(text if text.endswith("]\n") else text + "]")
    return events


def names(events: Events) -> dict[tuple[int, int | None], str]:
    """Of processes, under (pid, None), and of tracks, under (pid, tid)."""
    given = [event for event in events if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")]
    found = {(event["pid"], event.get("tid")): event["args"]["name"] for event in given}
    assert len(found) == len(given), "something has two names"
    return found


def slices(events: Events) -> list[Slice]:
    """Of complete events, and of pairs of a beginning and an end; in the order in which they ended in the file."""
    known, open_, found = names(events), dict[tuple[int, int], Events](), []

    def take(event: dict[str, Any], name: str, begin: int, end: int) -> None:
        track = known[event["pid"], event["tid"]]
        found.append(Slice(known[event["pid"], None], track, name, begin, end))

    for event in events:
        if event["ph"] == "X":
            take(event, event["name"], event["ts"], event["ts"] + event["dur"])
        elif event["ph"] == "B":
            open_.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["ph"] == "E":
            began = open_[event["pid"], event["tid"]].pop()
            assert began["name"] == event["name"]
            take(event, began["name"], began["ts"], event["ts"])
    assert not any(open_.values())
    return found


def arrows(events: Events) -> list[tuple[Slice, Slice]]:
    """The slices that each arrow joins: ours begin where these do."""
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) + len(ends) == sum(event["ph"] in ("s", "f") for event in events), "an arrow has three ends"
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["cat"], begin["name"]) == (end["cat"], end["name"]), "readers join equal names"
        assert end["bp"] == "e" and begin["ts"] <= end["ts"]
    known = names(events)
    at: dict[tuple[int, int, int], Slice] = {}  # by pid, tid and beginning; the outermost, which is written first
    for event in events:
        if event["ph"] == "X":
            key = event["pid"], event["tid"]
            found = Slice(known[key[0], None], known[key], event["name"], event["ts"], event["ts"] + event["dur"])
            at.setdefault((*key, event["ts"]), found)
    return [
        (at[begin["pid"], begin["tid"], begin["ts"]], at[end["pid"], end["tid"], end["ts"]])
        for begin, end in ((begins[number], ends[number]) for number in begins)
    ]


def check(events: Events) -> None:
    """Raises AssertionError where readers would draw something else than what was meant."""
    known = names(events)
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        if event["ph"] != "M":
            assert type(event["ts"]) is int and event["ts"] > 0
            assert (event["pid"], None) in known and (event["pid"], event["tid"]) in known
        assert event["ph"] in "BEXMisf"
    tracks: dict[tuple[str, str], list[Slice]] = {}
    for each in slices(events):
        assert each.end >= each.begin, each
        tracks.setdefault((each.process, each.track), []).append(each)
    for track in tracks.values():
        around: list[Slice] = []
        for each in sorted(track, key=lambda one: (one.begin, -one.end)):
            while around and around[-1].end <= each.begin:
                around.pop()
            assert not around or each.end <= around[-1].end, f"{each} ends after {around[-1]}, in which it began"
            around.append(each)
    assert all(begin.process == "driver" for begin, _ in arrows(events))
