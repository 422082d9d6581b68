from __future__ import annotations

import os
import signal
import threading

import pytest

from corerl.driver.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(number: signal.Signals) -> None:
    told: list[str] = []
    with StopRequest(told.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    what = "stopping after this step, or the next that can be resumed"
    assert told == [f"{number.name}: {what}; repeat to stop at once, without saving"]


def test_a_signal_waits_for_no_observers_lock() -> None:
    told: list[str] = []
    display = threading.Lock()  # not reentrant, as that of a live display

    def notify(text: str) -> None:
        with display:
            told.append(text)

    with StopRequest(notify) as stop:
        with display:
            os.kill(os.getpid(), signal.SIGINT)
            assert (stop.requested, told) == (True, [])
    assert [text.partition(":")[0] for text in told] == ["SIGINT"]
