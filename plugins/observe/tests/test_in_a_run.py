"""Every extension that wraps or tracks, in one real run of two ranks that stops and is resumed: what each left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugins.observe.tests.traces import Events, arrows, check, read, slices
from tests.end_to_end.command import Command, metrics, write_small

pytestmark = pytest.mark.processes

STEPS, RANKS = 4, 2
EXTENSIONS = """extensions=[
    {name="jsonl"},
    {name="nan-guard", options={parameters=true}},
    {name="memory"},
    {name="trace"},
    {name="wandb", options={mode="offline", project="sorting"}},
]"""
HALVES = ["forward_backward", "optimizer_step"]  # of a step
SHORT = [EXTENSIONS, "eval.every=0", "checkpoint.every=2", "checkpoint.export=false"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, and then the next two as a resumed run."""
    directory = tmp_path_factory.mktemp("extended")
    config, run_dir = write_small(directory), directory / "run"
    for more in (["run.steps=2"], [f"run.steps={STEPS}", "checkpoint.resume=auto"]):
        with Command("train", config, f"run.dir={run_dir}", *SHORT, *more, logs=directory) as command:
            assert command.finish() == 0, command.err
            command.assert_nothing_is_left()
            warnings = [line for line in command.errors if not line.startswith("wandb:")]
            assert warnings == []
    return run_dir


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_memory_is_told_by_call_its_peak_a_metric(run_dir: Path) -> None:
    told = [lines(run_dir / f"memory/actor-{rank}.jsonl") for rank in range(RANKS)]
    for records in told:
        assert [each["hook"] for each in records].count("init") == 2  # of both runs
        halves = [each for each in records if each["hook"] in HALVES]
        assert [each["hook"] for each in halves] == HALVES * (2 * STEPS)
        assert [each["optimizer_step"] for each in halves[1::2]] == list(range(2 * STEPS))
        assert all(each["peak_bytes"] >= each["held_bytes"] > 2**20 for each in records)
    of_ranks = [[each["peak_bytes"] for each in records if each["hook"] in HALVES] for records in told]
    peaks = [*map(max, *of_ranks)]
    for line in metrics(run_dir):
        own = peaks[4 * line["step"] : 4 * line["step"] + 4]  # of two steps
        assert line["train/peak_memory_gib"] == pytest.approx(max(own) / 2**30)


def test_a_healthy_run_has_no_findings(run_dir: Path) -> None:
    assert [line["train/nonfinite"] for line in metrics(run_dir)] == [0.0] * STEPS
    assert not (run_dir / "nan-guard").exists()


def test_wandb_has_both_runs_under_one_id(run_dir: Path) -> None:
    files = [path.name for path in run_dir.glob("wandb/offline-run-*/run-*.wandb")]
    run_id = json.loads((run_dir / "wandb.json").read_text())["run_id"]
    assert files == [f"run-{run_id}.wandb"] * 2


@pytest.fixture(params=["trace-1.json", "trace.json"])
def events(run_dir: Path, request: pytest.FixtureRequest) -> Events:
    """Of the first run, and of the one that was resumed."""
    return read(run_dir / request.param)


def test_every_process_is_drawn_and_every_arrow_has_both_ends(events: Events) -> None:
    check(events)
    ranks = {f"actor rank {rank}" for rank in range(RANKS)}
    assert {each.process for each in slices(events)} == {"driver", "idle", "engine-0", *ranks}
    assert len(arrows(events)) == sum(event.get("cat") == "call" for event in events)


def test_each_optimizer_step_lies_in_a_train_phase(events: Events) -> None:
    phases = [each for each in slices(events) if each[:3] == ("driver", "phases", "train")]
    steps = sorted(
        (each for each in slices(events) if each[:3] == ("actor rank 0", "calls", "train")), key=lambda each: each.begin
    )
    assert (len(phases), len(steps)) == (2, 4)
    within = [[phase.begin <= each.begin and each.end <= phase.end for phase in phases] for each in steps]
    assert within == [[True, False]] * 2 + [[False, True]] * 2
    asked = {call.name for call, step in arrows(events) if step.name == "train"}
    assert len(asked) == 4 and all(name.startswith("train at optimizer step ") for name in asked)
