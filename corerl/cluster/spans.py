"""Record what a process does inside its calls as time spans, reported by its code or sampled by a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from attrs import define, field

from corerl.cluster.watchdog import COLLECTIVES, LIBRARIES, frame_of
from corerl.plugin.events import Span

LOOK_SECONDS = 0.005  # between checks whether a call waits in a collective


@define
class CallRecord:
    """One call in progress."""

    lane: int  # the lowest one not used by another call of the process
    started: float
    spans: list[Span] = field(factory=list)  # in ending order
    waits: list[Span] = field(factory=list)
    _seen: tuple[int, str, float] | None = None  # frame id, name and start of the collective it was last seen in

    def look(self, frame: FrameType | None, now: float) -> None:
        """Sample the call. A collective counts from the look that first sees it until one that sees something else."""
        found = collective_in(frame)
        if self._seen is not None and (found is None or found[0] != self._seen[0]):
            self.waits.append(Span(name=self._seen[1], started=self._seen[2], ended=now))
            self._seen = None
        if found is not None and self._seen is None:
            self._seen = (*found, now)


class Recorder:
    """Records a block as a span: `with recorder("gather"): ...`. Calls in different threads are kept apart; outside a
    call, or in a thread that a call started, nothing is recorded."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._calls: dict[int, CallRecord] = {}  # by thread
        self._changing = threading.Lock()
        self._working = threading.Event()  # set while there is a call
        self._looking: threading.Thread | None = None

    def begin(self) -> None:
        """Note that a call begins in this thread."""
        with self._changing:
            taken = {call.lane for call in self._calls.values()}
            lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
            self._calls[threading.get_ident()] = CallRecord(lane, self.clock())
            self._working.set()
            if self._looking is None:
                self._looking = threading.Thread(target=self._look, name="corerl-collectives", daemon=True)
                self._looking.start()

    def end(self, ended: float) -> CallRecord:
        """End this thread's call; returns its record, with outer spans before the spans inside them."""
        with self._changing:
            call = self._calls.pop(threading.get_ident())
            call.look(None, ended)
            if not self._calls:
                self._working.clear()
        call.spans.reverse()
        call.spans.sort(key=lambda span: (span.started, -span.ended))
        return call

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            call = self._calls.get(threading.get_ident())
            if call is not None and call.started <= started:  # otherwise left over from an earlier call
                call.spans.append(Span(name=name, started=started, ended=self.clock()))

    def _look(self) -> None:
        while self._working.wait():
            with self._changing:
                for thread, call in self._calls.items():
                    call.look(frame_of(thread), self.clock())
            time.sleep(LOOK_SECONDS)


def collective_in(frame: FrameType | None) -> tuple[int, str] | None:
    """(frame id, name) of the torch.distributed collective that a thread with this innermost frame is in, or None."""
    while frame is not None and LIBRARIES.search(frame.f_code.co_filename):
        if COLLECTIVES.search(frame.f_code.co_filename):
            return id(frame), frame.f_code.co_name
        frame = frame.f_back
    return None
