"""Write what every process does, and when, to trace.json: slices and arrows for https://ui.perfetto.dev.

The file is an array of trace events (the Trace Event Format), one JSON object per line. A killed run leaves out the
closing bracket, which readers do not need.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias

from corerl.messages import printable
from corerl.observability import keep
from corerl.plugin import (
    CallFinished,
    Evaluated,
    Event,
    Idle,
    NoOptions,
    Notice,
    PhaseStarted,
    RunFinished,
    Span,
    StepFinished,
)

TRACE_FILE = "trace.json"
DRIVER = "driver"
IDLE = "idle"
CALLS_KEPT = 1000  # latest calls that are remembered as drawn

Record: TypeAlias = dict[str, Any]


class Trace:
    """Draws the driver's phases and calls, what ranks and engines waited for, each process's work, and an arrow from
    each call to each process.

    An existing trace.json, such as a resumed run's, is kept as trace-1.json, and so on.
    """

    def __init__(self, *, options: NoOptions, run_dir: str, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(run_dir) / TRACE_FILE
        self._clock = clock
        self._file: IO[str] | None = None
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}  # (process, track) -> pid, tid
        self._pids: dict[str, int] = {}
        self._kinds = [DRIVER, IDLE]  # kinds of processes, such as 'actor rank ', in order of appearance
        self._phase = ""  # the open phase
        self._asked: dict[tuple[str, float], None] = {}  # calls already drawn on the driver's row
        self._arrows = 0

    def observe(self, event: Event) -> None:
        match event:
            case PhaseStarted():
                self._end_phase()
                self._phase = event.name
                self._put(
                    self._record(DRIVER, "phases", "B", self._clock(), name=event.name, args={"step": event.step})
                )
            case StepFinished():
                self._end_phase()
                if event.idle:
                    self._put(*map(self._waited, event.idle))
            case Evaluated() | RunFinished():
                self._end_phase()
            case Notice():
                text = printable(event.text)
                self._put(self._record(DRIVER, "phases", "i", self._clock(), name=text, s="t"))
            case CallFinished():
                self._draw(event)

    def shutdown(self, reason: str) -> None:
        self._end_phase()
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None

    def _end_phase(self) -> None:
        if self._phase:
            self._put(self._record(DRIVER, "phases", "E", self._clock(), name=self._phase))
        self._phase = ""

    def _draw(self, work: CallFinished) -> None:
        whole = Span(name=work.verb, started=work.started, ended=work.ended)
        track = f"calls {work.lane + 1}" if work.lane else "calls"
        details = {"call": work.call} | ({"error": printable(work.error)} if work.error else {})
        self._arrows += 1
        arrow = {"cat": "flow", "name": work.verb, "id": self._arrows}
        # A slice must be written before a slice inside it that begins at the same time.
        self._put(
            *self._call(work),
            self._record(DRIVER, "calls", "s", work.asked, **arrow),
            self._slice(work.process, track, whole, "call", args=details),
            self._record(work.process, track, "f", work.started, bp="e", **arrow),
            *[self._slice(work.process, track, span, "span") for span in work.spans],
            *[self._slice(work.process, "collectives", span, "collective") for span in work.waits],
        )

    def _waited(self, idle: Idle) -> Record:
        return self._slice(IDLE, idle.who, Span(name=idle.waits_for, started=idle.started, ended=idle.ended), "idle")

    def _call(self, work: CallFinished) -> list[Record]:
        """The start of an arrow: the call on the driver's row, drawn once however many processes it went to."""
        call = (work.call, work.asked)
        if call in self._asked:
            return []
        self._asked[call] = None
        if len(self._asked) > CALLS_KEPT:
            del self._asked[next(iter(self._asked))]
        return [self._record(DRIVER, "calls", "X", work.asked, name=work.call, cat="ask", dur=1)]

    def _slice(self, process: str, track: str, span: Span, kind: str, **more: Any) -> Record:
        # Ends are rounded like starts, so that nested and consecutive slices stay so.
        duration = _micro(span.ended) - _micro(span.started)
        return self._record(process, track, "X", span.started, name=span.name, cat=kind, dur=duration, **more)

    def _record(self, process: str, track: str, ph: str, seconds: float, **more: Any) -> Record:
        pid, tid = self._row(process, track)
        return {"ph": ph, "ts": _micro(seconds), "pid": pid, "tid": tid, **more}

    def _row(self, process: str, track: str) -> tuple[int, int]:
        """pid and tid of a track. No number is used twice, for processes or tracks: some readers tell threads apart by
        tid alone."""
        if (process, track) not in self._rows:
            named = []
            if process not in self._pids:
                pid = self._pids[process] = self._number()
                sort = {"sort_index": self._sort_index(process)}
                named.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
                named.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": sort})
            pid = self._pids[process]
            tid = self._number()
            self._rows[process, track] = pid, tid
            named.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
            self._put(*named)
        return self._rows[process, track]

    def _number(self) -> int:
        return 1 + len(self._pids) + len(self._rows)

    def _sort_index(self, process: str) -> int:
        """Sorts the driver first, then kinds of processes by order of appearance, then by number."""
        match = re.fullmatch(r"(.*?)(\d*)", process)
        assert match is not None
        kind, number = match.groups()
        if kind not in self._kinds:
            self._kinds.append(kind)
        return 100_000 * self._kinds.index(kind) + int(number or 0)

    def _put(self, *records: Record) -> None:
        """Write records and flush them."""
        first = self._file is None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            keep(self._path)
            self._file = self._path.open("w", encoding="utf-8", newline="\n")
        # Perfetto does not decode \u escapes.
        lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
        self._file.write(("[\n" if first else ",\n") + lines)
        self._file.flush()


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
