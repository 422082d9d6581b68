from __future__ import annotations

import threading
import time

import pytest

from corerl.observability.timing import SCORING, Spans, idle, idle_seconds
from corerl.plugin.events import Idle, Span
from tests.machine import paced

# ---- idle devices ----


ENGINES = ("engine-0", "engine-1")


def waited(who: str, waits_for: str, started: float, ended: float) -> Idle:
    return Idle(who=who, waits_for=waits_for, started=started, ended=ended)


def test_a_synchronous_step_second_by_second() -> None:
    spans = [
        Span(name="engine-0", started=0.0, ended=4.0),
        Span(name="engine-1", started=0.0, ended=3.0),  # waits a second for the other's samples
        Span(name=SCORING, started=4.0, ended=6.0),
        Span(name="train", started=6.5, ended=9.0),  # after half a second of the driver's
        Span(name="update_weights", started=9.0, ended=10.0),
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


def test_an_engine_is_busy_while_any_of_its_requests_is() -> None:
    """Of 256 engines with 64 requests each, which took seconds."""
    names = [f"engine-{number}" for number in range(256)]
    begins = [(name, at / 8 + number / 2**14) for number, name in enumerate(names) for at in range(64)]
    spans = [Span(name=name, started=begin, ended=begin + 2.0) for name, begin in begins]
    began = time.perf_counter()
    found = idle([*spans, Span(name="engine-0", started=10.5, ended=11.0)], 0.0, 12.0, engines=names)
    assert time.perf_counter() - began < paced(1.0)
    end, last = 63 / 8 + 2.0, 63 / 8 + 2.0 + 255 / 2**14
    assert [each for each in found if each.who == "engine-0"] == [
        waited("engine-0", "longest", end, last),
        waited("engine-0", "driver", last, 10.5),
        waited("engine-0", "driver", 11.0, 12.0),
    ]
    of_last = [each.waits_for for each in found if each.who == "engine-255"]
    assert of_last == ["longest", "driver", "longest", "driver"]


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
    assert spans.take() == [Span(name="train", started=0.0, ended=2.0), Span(name="engine-0", started=0.0, ended=3.0)]
    now[0] = 5.0
    go.set()
    thread.join()
    assert spans.take() == [Span(name="engine-0", started=0.0, ended=5.0)] and spans.take() == []
