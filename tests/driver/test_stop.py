from __future__ import annotations

import os
import signal
import threading

import pytest

from corerl.driver.progress import Progress, StopRequest
from corerl.plugin.events import Event
from corerl.plugin.observers import Observers
from tests.driver.fakes import Ears, told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(number: signal.Signals) -> None:
    lines: list[str] = []
    with StopRequest(lines.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    what = "stopping after this step, or the next that can be resumed"
    assert lines == [f"{number.name}: {what}; repeat to stop at once, without saving"]


def test_a_signal_waits_for_no_observers_lock() -> None:
    display = threading.Lock()  # not reentrant, as that of a live display

    class Display(Ears):
        def observe(self, event: Event) -> None:
            with display:
                super().observe(event)

    shown = Display()
    progress = Progress(Observers([("display", shown)]), 0)
    with progress.beating(), StopRequest(progress.notice_later) as stop:
        with display:
            os.kill(os.getpid(), signal.SIGINT)
            assert (stop.requested, told(shown)) == (True, [])
    assert [text.partition(":")[0] for text in told(shown)] == ["SIGINT"]
