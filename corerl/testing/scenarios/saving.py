"""Checkpoints in the background, and those that are cut off."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import frozen

from corerl.checkpoint.writer import BackgroundWriter
from corerl.testing.harness import (
    Setup,
    State,
    error_of,
    running,
    state_of,
    step_at,
    train,
)
from corerl.testing.pool import OneRank

HELD_SECONDS = 60.0  # against hangs: how long a held writer waits to be released


@frozen(kw_only=True)
class SavedInBackground:
    complete: bool  # said when the save began
    while_held: bool  # said while the writer was held
    when_released: bool
    files_while_held: list[str]  # of this rank
    at_save: State
    after_step: State  # of the step that was trained while the writer was held


def save_in_background(setup: Setup, directory: str) -> SavedInBackground:
    """The writer is held from the beginning of the save until another step is trained."""
    release = threading.Event()

    def held(job: Callable[[], object]) -> None:
        if not release.wait(HELD_SECONDS):
            raise TimeoutError("the writer was never released")
        job()

    with running(setup) as worker:
        worker.backend._writer = BackgroundWriter(held)
        train(worker, setup, 0)
        at_save = state_of(worker)
        saved = worker.save(directory, step_at(1), True)
        while_held = worker.saved(False)
        train(worker, setup, 1)
        after_step = state_of(worker)
        files = [path.name for path in Path(directory).glob(f"*{worker.context.rank:05d}*")]
        release.set()
        return SavedInBackground(
            complete=saved.complete,
            while_held=while_held,
            when_released=worker.saved(True),
            files_while_held=files,
            at_save=at_save,
            after_step=after_step,
        )


def fail_to_save_in_background(setup: Setup, directory: str) -> tuple[str, str]:
    """The errors of asking whether it is saved, and of saving again to where it works."""
    with running(setup) as worker:
        worker.save(directory, step_at(0), True)
        failure = error_of(lambda: worker.saved(True))
        return failure, error_of(lambda: worker.save(f"{directory}-elsewhere", step_at(0), False))


def save_and_be_killed(setup: Setup, whole: str, cut: str, limit: int) -> None:
    """One save, and another in which the process dies as soon as it has written `limit` bytes to a file."""
    with running(setup) as worker:
        train(worker, setup, 0)
        worker.save(whole, step_at(1), False)
        train(worker, setup, 1)
        # The kernel ends the process inside write(), as SIGKILL would: Python is not asked.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        worker.save(cut, step_at(2), False)


def alone(scenario: Callable[..., object], *arguments: object) -> None:
    """In a process that was started for this one scenario."""
    torch.set_num_threads(1)
    OneRank().run(scenario, *arguments)
