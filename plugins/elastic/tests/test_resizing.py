"""Groups that change size while a run goes on: it is the run that it would have been."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from corerl_elastic.scaling import REQUEST
from tests.end_to_end.command import Command, numbers, write_small
from tests.end_to_end.faulty import NAME, fault

pytestmark = pytest.mark.processes
SETTINGS = ["run.steps=4", "checkpoint.background=false"]
SCALERS = "plugins.elastic.tests.scalers"
# That depend on all of a model's state.
SEEN = ("train/loss", "train/grad_norm", "train/entropy", "train/kl", "critic/loss", "critic/grad_norm")
ROUNDING = 1e-4  # of sums in another order, over few steps


def started(directory: Path, *overrides: str, scaler: str = "") -> Command:
    """A run with the extension, and one of `scalers.py` if it is named."""
    elastic = f"{{name='elastic', options={{scaler='{f'{SCALERS}:{scaler}' if scaler else ''}'}}}}"
    listed = f"extensions=[{{name='console'}}, {{name='jsonl'}}, {elastic}]"
    command = ("train", write_small(directory), f"run.dir={directory}/run", listed, *SETTINGS, *overrides)
    return Command(*command, logs=directory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    with started(directory, *fault("", "raise")) as command:
        assert command.finish() == 0, command.err
    return directory / "run"


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    """The same samples in every step, and the same training up to rounding."""
    found, wanted = numbers(run_dir), numbers(undisturbed)
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert row.get("rollout/reward") == other.get("rollout/reward")
        for name in SEEN:
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=ROUNDING)


def test_ranks_and_engines_are_resized_and_change_backend(tmp_path: Path, undisturbed: Path) -> None:
    run_dir, waiting = tmp_path / "run", fault("optimizer_step", "wait", step=1, once=True)
    with started(tmp_path, *waiting, scaler="up_and_down") as command:
        command.until((run_dir / "fault").exists, "in the middle of its second step")
        asked = ["backend.name=megatron", "roles.actor.ranks=1", "rollout.replicas=2"]
        with Command("scale", run_dir, *asked, logs=tmp_path) as scale:
            scale.until((run_dir / REQUEST).exists, "waiting for the end of the step")
            (run_dir / "go").touch()
            assert scale.finish() == 0, scale.err
            assert command.finish() == 0, command.err  # inside: the block's end kills what there is on this Ray
        command.assert_nothing_is_left()
    assert scale.out.startswith(f"actor: 2 ranks of {NAME} (dp 2) -> 1 rank of megatron (dp 1), ")
    assert re.findall(r"note: (?:actor|engines): (.*), \d", command.out) == [
        f"2 ranks of {NAME} (dp 2) -> 1 rank of megatron (dp 1)",
        "1 -> 2",
        "1 rank of megatron (dp 1) -> 2 ranks of megatron (dp 2)",
        "2 -> 1",
    ]
    assert_same(run_dir, undisturbed)
