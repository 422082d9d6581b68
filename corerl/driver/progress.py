"""Track where a run stands, report it to observers, and let SIGINT or SIGTERM stop it after its step."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from attrs import define, field

from corerl.observability.timing import Phases, Spans
from corerl.plugin.events import Event, Notice, PhaseProgress, PhaseStarted, RunFinished
from corerl.plugin.observers import Observers

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEAT_SECONDS = 1.0  # between two reports of how far a phase is
GENERATED, SCORED = "generated", "scored"
# What is counted in a phase: of evaluations, the answers to held-out prompts.
UNITS = {GENERATED: "samples generated", SCORED: "samples scored"}
EVAL_UNITS = {GENERATED: "answers sampled", SCORED: "answers scored"}


@define(eq=False)
class Current:
    """The phase that the run is in."""

    name: str
    began: float
    unit: str = ""
    done: int = 0
    of: int = 0


@define(eq=False)
class Progress:
    """Shared by all parts of a run on the driver."""

    observers: Observers
    steps_done: int  # rollout steps; also the index of the one that comes next
    seconds: Phases = field(factory=Phases)  # of the current step, by phase
    spans: Spans = field(factory=Spans)  # of phases, and of what else is done meanwhile
    clock: Callable[[], float] = time.monotonic
    began: float = field(factory=time.monotonic)  # when the run was launched, before anything was prepared
    _current: Current | None = None
    _later: queue.SimpleQueue[str | None] = field(factory=queue.SimpleQueue)  # its `put` is safe in a signal handler
    _loop: int = field(factory=threading.get_ident)  # the thread of the training loop

    @property
    def elapsed(self) -> float:
        """Seconds since the run was launched."""
        return self.clock() - self.began

    def emit(self, event: Event) -> None:
        if isinstance(event, RunFinished):
            self._current = None
        self.observers.emit(event)

    def notice(self, text: str) -> None:
        """Report a sentence that the user should read."""
        self.emit(Notice(text=text, step=self.steps_done))

    def notice_later(self, text: str) -> None:
        """Report it in the thread of `beating`: for a signal handler, which may have interrupted code that holds a lock
        of an observer's."""
        self._later.put(text)

    def begin(self, name: str) -> None:
        """Announce the start of something that takes a while."""
        self._current = Current(name, began=self.clock())
        self.emit(PhaseStarted(name=name, step=self.steps_done))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and time it for the step's metrics."""
        self.begin(name)
        with self.seconds(name), self.spans(name):
            yield

    def count(self, what: str, done: int, of: int) -> None:
        """Note how many samples are GENERATED or SCORED. Called from any thread; what is not the main
        one counts only while the main one waits for samples or an evaluation."""
        current = self._current
        if current is None or (threading.get_ident() != self._loop and current.name not in ("rollout", "eval")):
            return
        current.unit = (EVAL_UNITS if current.name == "eval" else UNITS)[what]
        current.done, current.of = done, of

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Report in a thread, for as long as the block runs, how far each phase is, and what is to be noticed later."""

        def beat() -> None:
            while True:
                try:
                    text = self._later.get(timeout=BEAT_SECONDS)
                except queue.Empty:
                    self.beat()
                    continue
                if text is None:
                    return
                self.notice(text)

        thread = threading.Thread(target=beat, name="corerl-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._later.put(None)
            thread.join()

    def beat(self) -> None:
        """Report how far the current phase is."""
        current = self._current
        if current is None:
            return
        self.emit(
            PhaseProgress(
                name=current.name,
                step=self.steps_done,
                seconds=self.clock() - current.began,
                unit=current.unit,
                done=current.done,
                of=current.of,
            )
        )


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `requested` and sends the user a sentence via `notify`, which
    is called in the signal handler; a second one raises KeyboardInterrupt. Outside the main thread, which alone may
    handle signals, they are left to the main thread's owner."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        self._notify(
            f"{name}: stopping after this step, or the next that can be resumed; repeat to stop at once, without saving"
        )
