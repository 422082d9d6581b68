"""How far a phase is: what is counted in it, and by whom."""

from __future__ import annotations

import threading

import pytest

from corerl.driver.progress import GENERATED, SCORED, Progress
from corerl.plugin.events import Event, PhaseProgress, PhaseStarted, RunFinished
from corerl.plugin.observers import Observers
from tests.driver.fakes import Ears


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hears() -> Ears:
    return Ears()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(hears: Ears, clock: Clock) -> Progress:
    return Progress(Observers([("hears", hears)]), 2, clock=clock)


def beat(progress: Progress, hears: Ears) -> Event:
    progress.beat()
    return hears.heard[-1]


def test_a_beat_reports_seconds_and_progress_of_a_phase(progress: Progress, hears: Ears, clock: Clock) -> None:
    progress.beat()
    assert hears.heard == []  # there is no phase
    progress.begin("rollout")
    clock.now = 3.0
    assert beat(progress, hears) == PhaseProgress(name="rollout", step=2, seconds=3.0)
    progress.count(GENERATED, 5, 64)
    clock.now = 4.0
    assert beat(progress, hears) == PhaseProgress(
        name="rollout", step=2, seconds=4.0, unit="samples generated", done=5, of=64
    )
    progress.count(SCORED, 64, 64)
    assert beat(progress, hears) == PhaseProgress(
        name="rollout", step=2, seconds=4.0, unit="samples scored", done=64, of=64
    )
    with progress.phase("train"):
        assert beat(progress, hears) == PhaseProgress(name="train", step=2, seconds=0.0)  # begins anew
    progress.emit(RunFinished(reason="finished", steps_done=2, seconds=4.0))
    assert beat(progress, hears) == RunFinished(reason="finished", steps_done=2, seconds=4.0)


def test_beats_come_from_a_thread_until_the_block_ends(hears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corerl.driver.progress.BEAT_SECONDS", 0.001)
    heard = threading.Event()

    class Waits(Ears):
        def observe(self, event: Event) -> None:
            super().observe(event)
            if isinstance(event, PhaseProgress):
                heard.set()

    waits = Waits()
    progress = Progress(Observers([("waits", waits)]), 0)
    with progress.beating():
        progress.begin("starting Ray")
        assert heard.wait(60.0)
    (thread,) = [each for each in threading.enumerate() if each.name == "corerl-progress"] or [None]
    if thread is not None:
        thread.join(60.0)
    assert waits.heard[0] == PhaseStarted(name="starting Ray", step=0)
    before = len(waits.heard)
    progress.begin("rollout")
    assert waits.heard[before:] == [PhaseStarted(name="rollout", step=0)]
