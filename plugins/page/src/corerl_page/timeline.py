"""trace.json of the extension `trace`, in a window of time: what each process did, and when its memory slept."""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from corerl.types import IntArray

if TYPE_CHECKING:
    from corerl_page.runs import Tail

TRACE_FILE = "trace.json"
IDLE = "idle"  # the process whose tracks say what others waited for
MEMORY = "memory"  # the track of when a process's memory slept
CALLS = re.compile(r"calls( \d+)?")  # the tracks of a process's calls


@define(eq=False)
class Track:
    """Slices in order of their starts, in microseconds."""

    process: str
    name: str
    # A long run has millions of slices, with few names.
    starts: array[int] = field(factory=lambda: array("q"))
    ends: array[int] = field(factory=lambda: array("q"))
    names: list[str] = field(factory=list)
    details: list[str] = field(factory=list)  # the call with its details, and its error
    longest: int = 0

    def add(self, start: int, end: int, name: str, detail: str = "") -> None:
        at = len(self.starts)
        while at and self.starts[at - 1] > start:  # calls are written as they end
            at -= 1
        self.starts.insert(at, start)
        self.ends.insert(at, end)
        self.names.insert(at, sys.intern(name))
        self.details.insert(at, sys.intern(detail))
        self.longest = max(self.longest, end - start)

    def window(self, first: int, last: int, finest: int) -> list[dict[str, Any]]:
        """The slices that reach into [first, last]. Neighbors shorter than `finest` are one, named by their number."""
        found: list[dict[str, Any]] = []
        for at in range(bisect_left(self.starts, first - self.longest), len(self.starts)):
            start, end = self.starts[at], self.ends[at]
            if start > last:
                break
            if end < first:
                continue
            before = found[-1] if found else None
            if before and end - start < finest and before["fine"] and start - before["end"] < finest:
                before["end"], before["count"] = max(before["end"], end), before["count"] + 1
                before["name"] = before["name"] if before["name"] == self.names[at] else "several"
                continue
            detail = self.details[at]
            found.append(
                {
                    "start": start,
                    "end": end,
                    "name": self.names[at],
                    "detail": detail,
                    "count": 1,
                    "fine": end - start < finest,
                }
            )
        return found


@define(eq=False)
class Timeline:
    _tail: Tail
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _processes: dict[int, str] = field(factory=dict, init=False)
    _tracks: dict[int, Track] = field(factory=dict, init=False)  # by tid, which no two processes share
    _begun: dict[int, tuple[int, str]] = field(factory=dict, init=False)  # by tid, the open phase
    _asleep: dict[str, int] = field(factory=dict, init=False)  # by process, since when
    _memory: dict[str, Track] = field(factory=dict, init=False)
    _bounds: tuple[int, int] | None = field(default=None, init=False)

    def window(self, first: int | None, last: int | None, *, width: int) -> dict[str, Any]:
        """All tracks between two times of the trace's clock, in microseconds since its first slice."""
        with self._lock:
            self._update()
            if self._bounds is None:
                return {"from": 0, "to": 0, "of": 0, "tracks": []}
            origin, end = self._bounds
            begin, until = origin + (first or 0), end if last is None else origin + last
            finest = max(1, (until - begin) // width)
            tracks = []
            for track in [*self._ordered(), *self._memory.values()]:
                slices = track.window(begin, until, finest)
                for each in slices:
                    each["start"], each["end"] = each["start"] - origin, each["end"] - origin
                tracks.append({"process": track.process, "track": track.name, "slices": slices})
            return {"from": begin - origin, "to": until - origin, "of": end - origin, "tracks": tracks}

    def processes(self) -> list[dict[str, Any]]:
        """What each rank and engine did last, how much of its time it worked, and what it waited for."""
        with self._lock:
            self._update()
            if self._bounds is None:
                return []
            origin, end = self._bounds
            waits = {track.name: track for track in self._tracks.values() if track.process == IDLE}
            found = []
            for process, tracks in self._working().items():
                idle = waits.get(process, waits.get("ranks") if " rank " in process else None)
                causes: dict[str, float] = {}
                for name, start, stop in zip(idle.names, idle.starts, idle.ends, strict=True) if idle else ():
                    causes[name] = causes.get(name, 0.0) + (stop - start) / 1e6
                starts, ends = (np.concatenate([getattr(each, side) for each in tracks]) for side in ("starts", "ends"))
                names, details = ([*chain(*(getattr(each, of) for each in tracks))] for of in ("names", "details"))
                order, last = np.argsort(starts, kind="stable"), int(ends.argmax())
                errors = [at for at in order if " error: " in details[at]]
                found.append(
                    {
                        "process": process,
                        "state": self._state(process, names[last], details[last]),
                        "last": details[last] or names[last],
                        "ended": (int(ends[last]) - origin) / 1e6,
                        "calls": len(names),
                        "seconds": max(end - int(starts.min()), 1) / 1e6,
                        "busy": _covered(starts[order], ends[order]) / 1e6,
                        "idle": causes,
                        "errors": [details[at] for at in errors[-5:]],
                    }
                )
            return sorted(found, key=lambda each: _natural(each["process"]))

    def _working(self) -> dict[str, list[Track]]:
        """The tracks of calls of each rank and engine: several of those that work on several calls at once."""
        found: dict[str, list[Track]] = {}
        for track in self._ordered():
            if track.process not in ("driver", IDLE) and CALLS.fullmatch(track.name) and track.names:
                found.setdefault(track.process, []).append(track)
        return found

    def _state(self, process: str, name: str, detail: str) -> str:
        """By its last call."""
        if " error: " in detail:
            return "failed"
        if name in ("shutdown", "close"):
            return "ended"
        return "asleep" if process in self._asleep else "awake"

    def _ordered(self) -> Iterator[Track]:
        """The driver first, then idle time, then ranks and engines as they appeared."""
        place = {name: at for at, name in enumerate(["driver", IDLE, *self._processes.values()])}
        return iter(sorted(self._tracks.values(), key=lambda track: place[track.process]))

    def _update(self) -> None:
        with self._tail.new() as (void, lines):
            if void:
                for known in (self._processes, self._tracks, self._begun, self._asleep, self._memory):
                    known.clear()
                self._bounds = None
            for _, line in lines:
                text = line.strip().rstrip(b",")
                if text not in (b"[", b"]", b""):
                    self._take(json.loads(text))

    def _take(self, record: dict[str, Any]) -> None:
        pid, tid, kind = record["pid"], record.get("tid", 0), record["ph"]
        if kind == "M":
            if record["name"] == "process_name":
                self._processes[pid] = record["args"]["name"]
            elif record["name"] == "thread_name":
                self._tracks[tid] = Track(self._processes[pid], record["args"]["name"])
        elif kind == "X" and record.get("cat") != "ask":
            arguments = record.get("args", {})
            detail = arguments.get("call", "") + (f" error: {arguments['error']}" if "error" in arguments else "")
            self._add(tid, record["ts"], record["ts"] + record["dur"], record["name"], detail, record.get("cat", ""))
        elif kind == "B":
            step = record.get("args", {}).get("step")
            self._begun[tid] = record["ts"], f"step {step}" if step is not None else ""
        elif kind == "E" and tid in self._begun:
            start, detail = self._begun.pop(tid)
            self._add(tid, start, record["ts"], record["name"], detail, "phase")

    def _add(self, tid: int, start: int, end: int, name: str, detail: str, kind: str) -> None:
        track = self._tracks[tid]
        # Spans lie within calls: on a track of their own neither hides the other.
        if kind == "span":
            track = self._tracks.setdefault(-tid, Track(track.process, f"{track.name}, parts"))
        track.add(start, end, name, detail)
        first, last = self._bounds or (start, end)
        self._bounds = min(first, start), max(last, end)
        if kind == "call" and name == "sleep":
            self._asleep.setdefault(track.process, end)
        elif kind == "call" and name == "wake_up" and track.process in self._asleep:
            asleep = self._memory.setdefault(track.process, Track(track.process, MEMORY))
            asleep.add(self._asleep.pop(track.process), end, "asleep")


def _natural(name: str) -> list[tuple[str, int]]:
    """engine-2 before engine-10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D+)(\d*)", name)]


def _covered(starts: IntArray, ends: IntArray) -> int:
    """Microseconds in which at least one call [n] was going on, in order of starts."""
    until = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
    return int(np.maximum(0, ends - np.maximum(starts, until)).sum())
