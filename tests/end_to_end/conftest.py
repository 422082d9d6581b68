"""One run of the real command, made once, that nothing interrupts and that others must equal."""

from __future__ import annotations

import fcntl
import os
import pickle
from pathlib import Path

import pytest
from attrs import frozen

from tests.end_to_end.command import Command, write_small


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("processes")


@frozen(kw_only=True)
class Finished:
    """A run that has ended by itself."""

    config: Path  # the file that was given
    overrides: list[str]
    run_dir: Path
    out: str
    err: str


# What a user would switch on: a penalty to a reference, the trainer's own old log-probs, everything that observes.
UNINTERRUPTED = [
    "algorithm.kl_coef=0.1",
    "algorithm.kl_estimator=k1",
    "algorithm.entropy_coef=0.01",
    "algorithm.old_logprobs=recompute",
    'extensions=[{name="console"},{name="jsonl"},{name="tensorboard"},{name="curves"}]',
]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Made by the first process of pytest-xdist that asks for it, for all of them: nobody writes to it."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "uninterrupted"
    directory.mkdir(exist_ok=True)
    made = directory / "finished.pickle"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(run_without_interruption(directory)))
    finished: Finished = pickle.loads(made.read_bytes())
    return finished


def run_without_interruption(directory: Path) -> Finished:
    config, run_dir = write_small(directory), directory / "run"
    with Command("train", config, f"run.dir={run_dir}", *UNINTERRUPTED, logs=directory) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
        return Finished(config=config, overrides=UNINTERRUPTED, run_dir=run_dir, out=command.out, err=command.err)
