"""Stop on request: the first SIGINT or SIGTERM ends the run after its step, a second one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What the first of them brings about, by run.mode; where training is meant, unless there is another sentence.
TRAINING = "finishing this step, then saving; repeat to stop at once without saving"
FINISHING = {
    "rollout-only": "finishing this batch; repeat to stop at once without it",
    "eval": "finishing the evaluation; repeat to stop at once without scores",
}


class StopRequest:
    """A context in which the first of the two signals sets `requested` and sends the user a sentence via `notify`, that
    of the run's `mode`.
    Outside the main thread, which alone may handle signals, they are left to the main thread's owner.

    `notify` runs in its own thread: the signal may interrupt code that holds a lock which `notify` needs.
    """

    def __init__(self, notify: Callable[[str], None], mode: str) -> None:
        self.requested = False
        self._finishing = FINISHING.get(mode, TRAINING)
        self._notify = notify
        self._before: dict[signal.Signals, object] = {}
        self._texts: SimpleQueue[str | None] = SimpleQueue()  # its `put` is safe in a signal handler
        self._teller = Thread(target=self._tell, name="stop-request", daemon=True)

    def __enter__(self) -> StopRequest:
        self._teller.start()
        for number in SIGNALS if current_thread() is main_thread() else ():
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._texts.put(None)
        self._teller.join()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        self._texts.put(f"{name}: {self._finishing}")

    def _tell(self) -> None:
        while (text := self._texts.get()) is not None:
            self._notify(text)
