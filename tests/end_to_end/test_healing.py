"""A rank that dies, or freezes, costs the steps since the last checkpoint, and no run: others take its place, and the
steps that are done again are what they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.command import Command, content, numbers, write_small
from tests.end_to_end.faulty import fault
from tests.end_to_end.faulty_engine import NAME as ENGINE

SETTINGS = ["run.steps=5", "checkpoint.background=false", "extensions=[{name='console'}, {name='jsonl'}]"]


def run(directory: Path, *overrides: str) -> Command:
    arguments = ["train", write_small(directory), f"run.dir={directory}/run", *SETTINGS, *overrides]
    with Command(*arguments, logs=directory) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    return command


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, *fault("", "raise"))
    return directory / "run"


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    """To the last bit: the metrics, evaluations among them, and the tensors of the last checkpoint."""
    without = [
        {name: value for name, value in row.items() if not name.startswith("memory/")} for row in numbers(run_dir)
    ]
    assert without == numbers(undisturbed)
    found, wanted = (
        {name: each for name, each in content(end).items() if name.endswith(".safetensors")}
        for end in (run_dir / "checkpoints/step-00000005", undisturbed / "checkpoints/step-00000005")
    )
    assert found == wanted and len(found) == 2


def test_with_in_memory_checkpoints_at_most_one_step_is_replayed(tmp_path: Path, undisturbed: Path) -> None:
    """Also where ranks and engines take turns in memory."""
    kept = ["checkpoint.memory=true", "checkpoint.every=0", "cluster.offload=always"]
    killed = run(tmp_path, *fault("optimizer_step", "kill", step=3, once=True), *kept)
    (step,) = re.findall("; restarting all ranks from the in-memory checkpoint after (.*)", killed.out)
    assert step in ("3 steps", "2 steps; replaying step 2")  # the one that was being written when the rank died
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.nightly
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    killed = run(tmp_path, *fault("optimizer_step", "kill", step=3, once=True))
    assert "actor rank 1: its process died during train at optimizer step 6" in killed.out
    assert "; restarting all ranks from the checkpoint after 2 steps; replaying step 2" in killed.out
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.nightly
def test_a_rank_and_the_only_engine_may_both_die(tmp_path: Path, undisturbed: Path) -> None:
    """The engine dies as it samples the first batch; the update that follows would be the second one."""
    table = f'engines."{ENGINE}"'
    engine = {"directory": tmp_path, "replica": 0, "deaths": 1, "after": 1}
    settings = [f"rollout.engine={ENGINE}", *(f"{table}.{name}={value}" for name, value in engine.items())]
    killed = run(tmp_path, *fault("update_weights", "kill", step=1, once=True), *settings)
    assert "engine-0: its process died during generate" in killed.out
    assert "actor rank 1: its process died during update_weights" in killed.out
    assert "; restarting all ranks from the initial weights\n" in killed.out
    assert_same(tmp_path / "run", undisturbed)
