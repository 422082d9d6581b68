"""An engine that dies while it samples is replaced, once; the samples are those that it would have drawn."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.command import Command, numbers, write_small
from tests.end_to_end.faulty_engine import NAME

SMALL = ["backend.name=plain", "roles.actor.ranks=1", "run.steps=3", "rollout.replicas=2", "eval.every=0"]


def run(tmp_path: Path, deaths: int, *arguments: str) -> Command:
    """A run of which nothing is left."""
    marks = tmp_path / "marks"
    marks.mkdir()
    table = f'engines."{NAME}"'
    engine = [f"rollout.engine={NAME}", f"{table}.directory={marks}", f"{table}.deaths={deaths}", f"{table}.after=1"]
    command = Command(
        *("train", write_small(tmp_path), *SMALL, *engine, f"run.dir={tmp_path}/run", *arguments), logs=tmp_path
    )
    with command:
        command.finish()
        command.assert_nothing_is_left()
    assert len(list(marks.iterdir())) == min(deaths, 2)
    return command


def test_an_engine_that_dies_once_is_replaced_and_the_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    for directory, deaths in ((disturbed, 1), (undisturbed, 0)):
        directory.mkdir()
        # Ranks and engines take turns in memory, so that the new one's weights come in the middle of a turn.
        command = run(directory, deaths, "cluster.offload=always", "extensions=[{name='jsonl'},{name='console'}]")
        assert command.process.returncode == 0, command.err
        assert ("engine-1 is replaced, once: engine-1: its process died during generate" in command.out) == bool(deaths)
    assert numbers(disturbed / "run") == numbers(undisturbed / "run")
    assert len(numbers(disturbed / "run")) == 3


def test_an_engine_that_dies_again_ends_the_run_with_its_name(tmp_path: Path) -> None:
    command = run(tmp_path, 9)
    assert command.process.returncode == 1
    (line,) = command.err.splitlines()
    assert line.startswith("corerl: error: engine-1: its process died during generate (")
