"""How far a phase is: what is counted in it, and by whom."""

from __future__ import annotations

import pytest

from corerl.driver.progress import GENERATED, SCORED, Progress
from corerl.plugin.events import Event, PhaseProgress, RunFinished
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
