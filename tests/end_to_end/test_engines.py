"""An engine that dies while it samples or takes weights is replaced; the samples are those that it would have drawn."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.command import Command, numbers, write_small
from tests.end_to_end.faulty_engine import NAME
from tests.machine import paced

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
    assert len(list(marks.glob("death-*"))) == min(deaths, 2)
    return command


def test_an_engine_that_dies_or_freezes_while_it_samples_and_again_in_the_update_after_it_changes_nothing(
    tmp_path: Path,
) -> None:
    collective = "weights.transport=collective"
    freezes = [f'engines."{NAME}".how=freeze', f"cluster.health_timeout={paced(6.0)}"]
    silent = f"its process was killed during {{}}: no heartbeat for {paced(6.0):g} s (cluster.health_timeout)"
    for name, deaths, settings, happens in (
        ("undisturbed", 0, ["weights.transport=auto"], ""),
        ("killed", 2, [collective], "its process died during {}"),
        ("frozen", 2, [collective, *freezes], silent),
    ):
        (tmp_path / name).mkdir()
        # Ranks and engines take turns in memory, so that the new one's weights come in the middle of a turn.
        settings += ["cluster.offload=always", "extensions=[{name='jsonl'},{name='console'}]"]
        command = run(tmp_path / name, deaths, *settings)
        assert command.process.returncode == 0, command.err
        told = [f"engine-1 is replaced: engine-1: {happens.format(verb)}" for verb in ("generate", "receive")]
        assert [line in command.out for line in told] == [bool(deaths)] * 2, command.out
        assert numbers(tmp_path / name / "run") == numbers(tmp_path / "undisturbed" / "run")
        assert len(numbers(tmp_path / name / "run")) == 3


def test_an_engine_that_dies_as_it_starts_and_whose_successor_hangs_there_is_replaced_twice(tmp_path: Path) -> None:
    bound = paced(20.0)
    settings = [f'engines."{NAME}".starts=true', f"cluster.start_timeout={bound}", "rollout.restarts=2"]
    command = run(tmp_path, 0, *settings, "extensions=[{name='jsonl'},{name='console'}]")
    assert command.process.returncode == 0, command.err
    assert "engine-1 is replaced: engine-1: its process died during start (" in command.out
    assert {each.name for each in (tmp_path / "marks").iterdir()} == {"start-1", "hung"}
    assert len(numbers(tmp_path / "run")) == 3


def test_an_engine_that_dies_more_often_than_it_may_ends_the_run_with_its_name(tmp_path: Path) -> None:
    command = run(tmp_path, 9, "rollout.restarts=1")
    assert command.process.returncode == 1
    line, note = command.errors
    assert note == "corerl: error: the engine had already been restarted 1 time (rollout.restarts)"
    assert line.startswith("corerl: error: engine-1: its process died during receive (")
