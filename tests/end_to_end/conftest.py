"""One run of the real command, made once, that nothing interrupts: what others must equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from tests.end_to_end.command import Command, write_small


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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    config, run_dir = write_small(directory), directory / "run"
    with Command("train", config, f"run.dir={run_dir}", *UNINTERRUPTED, logs=directory) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
        yield Finished(config=config, overrides=UNINTERRUPTED, run_dir=run_dir, out=command.out, err=command.err)
