"""How far a phase is: what is counted in it, and by whom."""

from __future__ import annotations

from corerl.driver.progress import GENERATED, SCORED, Progress
from corerl.plugin.events import Event, PhaseProgress, RunFinished
from corerl.plugin.observers import Observers
from tests.driver.fakes import Ears
from tests.observability.run import Clock


def test_a_beat_reports_seconds_and_progress_of_a_phase() -> None:
    hears, clock = Ears(), Clock()
    progress = Progress(Observers([("hears", hears)]), 2, clock=clock)

    def beat() -> Event:
        progress.beat()
        return hears.heard[-1]

    progress.beat()
    assert hears.heard == []  # there is no phase
    progress.begin("rollout")
    clock.now = 3.0
    assert beat() == PhaseProgress(name="rollout", step=2, seconds=3.0)
    clock.now = 4.0
    for unit, name, done in ((GENERATED, "samples generated", 5), (SCORED, "samples scored", 64)):
        progress.count(unit, done, 64)
        assert beat() == PhaseProgress(name="rollout", step=2, seconds=4.0, unit=name, done=done, of=64)
    with progress.phase("train"):
        assert beat() == PhaseProgress(name="train", step=2, seconds=0.0)  # begins anew
    finished = RunFinished(reason="finished", steps_done=2, seconds=4.0)
    progress.emit(finished)
    assert beat() == finished
