"""Who may change or stop a run from outside: its extensions (`corerl.plugin.hooks.RunControl`), and signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from types import FrameType, TracebackType

from attrs import define, field

from corerl.driver.groups import Groups
from corerl.driver.progress import Progress
from corerl.errors import InsufficientResources
from corerl.plan.plan import Plan
from corerl.plugin.hooks import ProcessFailure
from corerl.plugin.registry import INSTALL_HINTS, Kind

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `requested` and sends the user a sentence via `notify`; a
    second one raises KeyboardInterrupt. Outside the main thread, which alone may handle signals, they are left to the
    main thread's owner.

    `notify` runs in its own thread: the signal may interrupt code that holds a lock which `notify` needs.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._before: dict[signal.Signals, object] = {}
        self._texts: SimpleQueue[str | None] = SimpleQueue()  # its `put` is safe in a signal handler
        self._notifier = Thread(target=self._send, name="stop-request", daemon=True)

    def __enter__(self) -> StopRequest:
        self._notifier.start()
        for number in SIGNALS if current_thread() is main_thread() else ():
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._texts.put(None)
        self._notifier.join()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        self._texts.put(f"{name}: stopping after this step; repeat to stop at once, without saving")

    def _send(self) -> None:
        while (text := self._texts.get()) is not None:
            self._notify(text)


@define(kw_only=True, eq=False)
class Control:
    """What extensions get in `between_steps` and `ranks_failed`, and what calls these."""

    groups: Groups  # for the wheels that are released with this core
    progress: Progress
    stop: StopRequest
    _save: Callable[[], Path] | None = field(default=None, init=False)  # while extensions are asked between steps
    _failure: ProcessFailure | None = field(default=None, init=False)  # while extensions are asked about it

    # ---- for extensions ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.progress.steps_done

    @property
    def plan(self) -> Plan:
        return self.groups.plan

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.groups.sizes

    def replan(self, overrides: Sequence[str]) -> Plan:
        return self.plan.resized(overrides)

    def apply(self, plan: Plan) -> list[str]:
        if self._failure is not None:
            lines = self.groups.start_by(plan, staying=[] if self._failure.ranks else [*self.groups.roles])
        else:
            assert self._save is not None
            lines = self.groups.change(plan, self._save)
        for line in lines:
            self.notice(line)
        return lines

    def notice(self, text: str) -> None:
        self.progress.notice(text)

    def request_stop(self) -> None:
        self.stop.requested = True

    # ---- for the run ------------------------------------------------------------------------------------------------

    def between_steps(self, save: Callable[[], Path]) -> set[str]:
        """Ask the extensions; returns the groups that have changed, or may have: engines may be new, or asleep. `save`
        completes a checkpoint of this step, from which ranks can restart."""
        self.groups.changed, self._save = set(), save
        try:
            self.progress.observers.ask("between_steps", run=self)
        finally:
            self._save = None
        return self.groups.changed

    def failed(self, message: str, *, ranks: bool) -> None:
        """Ask the extensions how to go on after all ranks, or engines alone, have ended. Raises InsufficientResources
        if a lost machine cannot be replaced, and WorkerDied if ranks have to end too."""
        self.groups.pool.poll()
        if not ranks:
            self.groups.require_ranks()
        self._failure = ProcessFailure(message=message, ranks=ranks, lost=self.groups.lost)
        try:
            self.progress.observers.ask("ranks_failed", run=self, failure=self._failure)
        finally:
            self._failure = None
        if lost := self.groups.lost:
            counts = ", ".join(f"{count} of {name}" for name, count in lost.items())
            raise InsufficientResources(
                f"processes without a place: {counts}; to go on with spare machines, or in smaller groups: "
                f"{INSTALL_HINTS[Kind.EXTENSIONS]['elastic']}"
            )
        self.groups.seat_engines()
