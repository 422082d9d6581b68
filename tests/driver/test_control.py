from __future__ import annotations

import os
import signal
import threading

import pytest

from corerl.driver.control import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(number: signal.Signals) -> None:
    told: list[str] = []
    with StopRequest(told.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert told == [f"{number.name}: stopping after this step; repeat to stop at once, without saving"]


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


def test_afterwards_signals_do_what_they_did_before() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        interrupt = signal.getsignal(signal.SIGINT)
        with StopRequest(lambda text: None) as stop:
            assert signal.getsignal(signal.SIGINT) != interrupt
        assert signal.getsignal(signal.SIGINT) == interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert (received, stop.requested) == ([signal.SIGTERM], False)
    finally:
        signal.signal(signal.SIGTERM, before)
