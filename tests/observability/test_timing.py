from __future__ import annotations

import threading

import pytest

from corerl.observability.timing import SCORING, Span, Spans, idle, idle_seconds
from corerl.plugin.events import Idle

# ---- idle devices ----


ENGINES = ("engine-0", "engine-1")


def waited(who: str, waits_for: str, started: float, ended: float) -> Idle:
    return Idle(who=who, waits_for=waits_for, started=started, ended=ended)


def test_a_synchronous_step_second_by_second() -> None:
    spans = [
        Span("engine-0", 0.0, 4.0),
        Span("engine-1", 0.0, 3.0),  # waits a second for the other's samples
        Span(SCORING, 4.0, 6.0),
        Span("train", 6.5, 9.0),  # after half a second of the driver's
        Span("update_weights", 9.0, 10.0),
    ]
    found = idle(spans, 0.0, 10.0, engines=ENGINES)
    assert sorted(found, key=lambda each: (each.who, each.started)) == [
        waited("engine-0", "rewards", 4.0, 6.0),
        waited("engine-0", "driver", 6.0, 6.5),
        waited("engine-0", "training", 6.5, 9.0),
        waited("engine-1", "longest", 3.0, 4.0),
        waited("engine-1", "rewards", 4.0, 6.0),
        waited("engine-1", "driver", 6.0, 6.5),
        waited("engine-1", "training", 6.5, 9.0),
        waited("ranks", "samples", 0.0, 4.0),
        waited("ranks", "rewards", 4.0, 6.0),
        waited("ranks", "driver", 6.0, 6.5),
    ]
    assert idle_seconds(found, engines=2) == pytest.approx(
        {
            "idle/ranks/total": 6.5,
            "idle/ranks/samples": 4.0,
            "idle/ranks/rewards": 2.0,
            "idle/ranks/driver": 0.5,
            "idle/engines/total": 0.5 + 2.0 + 0.5 + 2.5,
            "idle/engines/longest": 0.5,
            "idle/engines/rewards": 2.0,
            "idle/engines/driver": 0.5,
            "idle/engines/training": 2.5,
        }
    )


def test_spans_of_all_threads_are_taken_once() -> None:
    now = [0.0]
    spans = Spans(lambda: now[0])
    go, entered = threading.Event(), threading.Event()

    def work() -> None:
        with spans("engine-0"):
            entered.set()
            go.wait(60.0)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(60.0)
    with spans("train"):
        now[0] = 2.0
    now[0] = 3.0
    assert spans.take() == [Span("train", 0.0, 2.0), Span("engine-0", 0.0, 3.0)]
    now[0] = 5.0
    go.set()
    thread.join()
    assert spans.take() == [Span("engine-0", 0.0, 5.0)] and spans.take() == []
