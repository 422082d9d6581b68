"""Save checkpoints in the background, and cut saves off."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from corerl.checkpoint.writer import BackgroundWriter
from corerl_testing.harness import (
    Setup,
    State,
    error_of,
    running,
    start,
    state_of,
    step_at,
    train,
)
from corerl_testing.require import require_equal

HELD_SECONDS = 60.0  # against hangs: how long a held writer waits, and how long to wait until it is held


@frozen(kw_only=True)
class SavedInBackground:
    complete: bool  # the answer when the save began
    while_held: bool  # the answer while the writer was held
    when_released: bool
    files_while_held: list[str]  # of this rank
    at_save: State
    after_step: State  # after the step that was trained while the writer was held


def save_in_background(setup: Setup, directory: str) -> SavedInBackground:
    """Save while the writer is held from the beginning of the save until another step is trained."""
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
    """The errors of waiting for a background save that fails, and of the next save, which can work."""
    with running(setup) as worker:
        worker.save(directory, step_at(0), True)
        failure = error_of(lambda: worker.saved(True))
        return failure, error_of(lambda: worker.save(f"{directory}-elsewhere", step_at(0), False))


def save_and_be_held(setup: Setup, whole: str, cut: str, background: bool) -> State:
    """Save once, then a second time without ever finishing on rank 0: its writing thread is held after opening the last
    file that Python opens for the save (safetensors opens its own), before writing to it. Returns this rank's state at
    the first save; the caller then kills the ranks by SIGKILL."""
    files = Counter[str]()  # directory of a save -> number of files opened for writing
    held = threading.Event()
    over = threading.Event()  # held, or ended
    failures: list[Exception] = []

    def hold(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or isinstance(args[0], int) or not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path, _, flags = args
        directory = next((each for each in (whole, cut) if Path(os.fsdecode(path)).is_relative_to(each)), "")
        files[directory] += 1
        if directory == cut and files[cut] == files[whole]:
            os.close(os.open(path, flags, 0o666))  # opens the file: an audit hook is called before the open
            held.set()
            over.set()
            threading.Event().wait()

    def save() -> None:
        try:
            worker.save(cut, step_at(2), background)
        except Exception as error:
            failures.append(error)
        over.set()

    worker, _ = start(setup)  # never shut down, which would wait for the writer
    train(worker, setup, 0)
    at_save = state_of(worker)
    if worker.context.rank == 0:
        sys.addaudithook(hold)
    saved = worker.save(whole, step_at(1), background)
    require_equal(f"SaveResult.complete of save(background={background})", saved.complete, not background)
    worker.saved(True)
    train(worker, setup, 1)
    threading.Thread(target=save, daemon=True).start()
    over.wait(HELD_SECONDS)
    if failures:
        raise failures[0]
    if worker.context.rank > 0:
        worker.saved(True)
    elif not held.wait(HELD_SECONDS):
        raise TimeoutError(
            f"the save was not held within {HELD_SECONDS:.0f} s: this process opened {files[whole]} files to write "
            f"the previous save, but {files[cut]} for this one; each save must open as many, one or more from Python"
        )
    return at_save
