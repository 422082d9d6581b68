"""Stop when asked: the first SIGINT or SIGTERM ends the run after its step, a second one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the two signals set `requested`, and call `notify` once with a sentence for the user."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
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
        self._notify(f"{name}: finishing this step, then saving; once more stops at once and saves nothing")
