"""Stop a run after its step at SIGINT or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from types import FrameType, TracebackType

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
        self._texts.put(
            f"{name}: stopping after this step, or the next that can be resumed; repeat to stop at once, without saving"
        )

    def _send(self) -> None:
        while (text := self._texts.get()) is not None:
            self._notify(text)
