"""An engine that dies while it samples or takes weights is replaced; the samples are those that it would have drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import Command, numbers, write_small
from tests.end_to_end.faulty_engine import NAME
from tests.machine import paced

SMALL = ["backend.name=plain", "roles.actor.ranks=1", "run.steps=3", "rollout.replicas=2", "eval.every=0"]

# Ranks and engines take turns in memory, so that the new one's weights come in the middle of a turn.
TURNS = ["cluster.offload=always", "extensions=[{name='jsonl'},{name='console'}]"]


def run(tmp_path: Path, deaths: int, *arguments: str) -> Command:
    """A finished run that has left no process."""
    marks = tmp_path / "marks"
    marks.mkdir()
    table = f'engines."{NAME}"'
    engine = [f"rollout.engine={NAME}", f"{table}.directory={marks}", f"{table}.deaths={deaths}"]
    engine += [f"{table}.after=2"]  # the first of them before the first step
    command = Command(
        *("train", write_small(tmp_path), *SMALL, *engine, f"run.dir={tmp_path}/run", *arguments), logs=tmp_path
    )
    with command:
        command.finish()
        command.assert_nothing_is_left()
    assert len(list(marks.glob("death-*"))) == min(deaths, 2)
    return command


FREEZES = [f'engines."{NAME}".how=freeze', f"cluster.health_timeout={paced(6.0)}"]
SILENT = f"its process was killed during {{}}: no heartbeat for {paced(6.0):g} s (cluster.health_timeout)"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, 0, *TURNS, "weights.transport=auto")
    return directory / "run"


@pytest.mark.parametrize(
    ("settings", "happens"),
    [
        pytest.param([], "its process died during {}", id="killed"),
        pytest.param(FREEZES, SILENT, id="frozen", marks=pytest.mark.nightly),
    ],
)
def test_an_engine_lost_in_sampling_and_update_changes_nothing(
    tmp_path: Path, undisturbed: Path, settings: list[str], happens: str
) -> None:
    command = run(tmp_path, 2, *TURNS, "weights.transport=collective", *settings)
    assert command.process.returncode == 0, command.err
    for verb in ("generate", "receive"):
        assert f"engine-1 is replaced: engine-1: {happens.format(verb)}" in command.out
    assert numbers(tmp_path / "run") == numbers(undisturbed)
    assert len(numbers(undisturbed)) == 3


@pytest.mark.nightly
def test_an_engine_that_dies_and_hangs_at_start_is_replaced(tmp_path: Path) -> None:
    bound = paced(20.0)
    settings = [f'engines."{NAME}".starts=true', f"cluster.start_timeout={bound}", "rollout.restarts=2"]
    command = run(tmp_path, 0, *settings, "extensions=[{name='jsonl'},{name='console'}]")
    assert command.process.returncode == 0, command.err
    assert "engine-1 is replaced: engine-1: its process died during start (" in command.out
    assert {each.name for each in (tmp_path / "marks").iterdir()} == {"start-1", "hung"}
    assert len(numbers(tmp_path / "run")) == 3
