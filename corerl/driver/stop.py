"""Stop a run after its step at SIGINT or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `requested` and sends the user a sentence via `notify`, which
    is called in the signal handler; a second one raises KeyboardInterrupt. Outside the main thread, which alone may
    handle signals, they are left to the main thread's owner."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS if current_thread() is main_thread() else ():
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
