"""A run whose machines die goes on: on a spare one, or with fewer ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.nodes import machines
from tests.end_to_end.command import Command, numbers, write_small
from tests.end_to_end.faulty import NAME, fault
from tests.machine import paced

pytestmark = pytest.mark.processes
USER = "tests.end_to_end.user_functions"
EXTENSIONS = "extensions=[{name='console'}, {name='jsonl'}]"
SETTINGS = ["run.steps=5", "checkpoint.background=false"]


@pytest.mark.nightly
def test_a_lost_machine_is_replaced_or_the_group_shrinks(tmp_path: Path) -> None:
    """One rank on each of two machines, of which one has the engine too. The first to die has a successor."""
    node = {"object_store_memory": 100 * 2**20}
    one, other, spare = ({**node, "num_cpus": 1, "resources": {name: 1}} for name in ("one", "other", "spare"))
    soon = {"RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "500"}
    with machines({**node, "num_cpus": 0, "include_dashboard": False}, one, other, **soon) as nodes:
        elastic = f"{{name='elastic', options={{spare_timeout={paced(4.0)}}}}}"
        cluster = [f"cluster.address={nodes.address}", f"extensions=[{{name='console'}}, {{name='jsonl'}}, {elastic}]"]
        held = f"rollout.postprocess={USER}:held"
        arguments = ["train", write_small(tmp_path), f"run.dir={tmp_path}/run", *SETTINGS]
        arguments += fault("", "raise", once=True)
        for step in (0, 1, 2):
            (tmp_path / f"go-{step}").touch()
        own = {"own_ray": True, "own_forks": True}
        with Command(*arguments, *cluster, held, logs=tmp_path, directory=tmp_path, **own) as command:
            command.until((tmp_path / "at-3").exists, "in its fourth step")
            nodes.add(**spare)
            nodes.kill("one")
            (tmp_path / "go-3").touch()
            command.until((tmp_path / "at-4").exists, "in its fifth step")
            nodes.kill("other")
            (tmp_path / "go-4").touch()
            assert command.finish() == 0, command.err
            command.assert_nothing_is_left()
    assert re.findall(r"restarting all ranks from (.*)|note: actor: (.*)", command.out) == [
        ("the checkpoint after 2 steps; replaying step 2", ""),
        ("", f"2 ranks of {NAME} (dp 2) -> 1 rank of {NAME} (dp 1)"),
        ("the checkpoint after 4 steps", ""),
    ]
    (undisturbed := tmp_path / "undisturbed").mkdir()
    arguments[1:3] = [write_small(undisturbed), f"run.dir={undisturbed}/run"]
    with Command(*arguments, EXTENSIONS, logs=undisturbed) as command:
        assert command.finish() == 0, command.err
    found, wanted = numbers(tmp_path / "run"), numbers(undisturbed / "run")
    assert found[:-2] == wanted[:-2]  # to the last bit: two ranks as before
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, as_whole in zip(found[-2:], wanted[-2:], strict=True):
        for name in ("rollout/reward", "eval/reward", "train/loss", "train/grad_norm", "train/entropy"):
            assert row.get(name, 0.0) == pytest.approx(as_whole.get(name, 0.0), rel=1e-4)
