"""An engine that dies while it samples or takes weights is replaced; the samples are those that it would have drawn."""

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
    engine = [f"rollout.engine={NAME}", f"{table}.directory={marks}", f"{table}.deaths={deaths}"]
    engine += [f"{table}.after=2"]  # of which the first one comes before the first step
    command = Command(
        *("train", write_small(tmp_path), *SMALL, *engine, f"run.dir={tmp_path}/run", *arguments), logs=tmp_path
    )
    with command:
        command.finish()
        command.assert_nothing_is_left()
    assert len(list(marks.iterdir())) == min(deaths, 2)
    return command


def test_an_engine_that_dies_while_it_samples_and_again_in_the_update_after_it_changes_nothing(tmp_path: Path) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    for directory, deaths, transport in ((disturbed, 2, "collective"), (undisturbed, 0, "auto")):
        directory.mkdir()
        # Ranks and engines take turns in memory, so that the new one's weights come in the middle of a turn.
        settings = ["cluster.offload=always", f"weights.transport={transport}"]
        command = run(directory, deaths, *settings, "extensions=[{name='jsonl'},{name='console'}]")
        assert command.process.returncode == 0, command.err
        told = [f"engine-1 is replaced: engine-1: its process died during {verb}" for verb in ("generate", "receive")]
        assert [line in command.out for line in told] == [bool(deaths)] * 2
    assert numbers(disturbed / "run") == numbers(undisturbed / "run")
    assert len(numbers(disturbed / "run")) == 3


def test_an_engine_that_dies_more_often_than_it_may_ends_the_run_with_its_name(tmp_path: Path) -> None:
    command = run(tmp_path, 9, "rollout.restarts=1")
    assert command.process.returncode == 1
    (line,) = command.err.splitlines()
    assert line.startswith("corerl: error: engine-1: its process died during receive (")
