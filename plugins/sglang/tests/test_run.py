"""`corerl train` with the engine, its server the stand-in: placed on two bundles, asleep in turns, dead once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import Command, metrics, write_small

pytestmark = pytest.mark.processes


def test_a_run_outlives_the_death_of_its_server(tmp_path: Path) -> None:
    marker, temporary = tmp_path / "died", tmp_path / "temporary"
    temporary.mkdir()
    engine = [
        *("rollout.engine=sglang", "engines.sglang.launcher=plugins.sglang.tests.stand_in"),
        *("engines.sglang.tensor_parallel=2", "engines.sglang.deterministic=true", "engines.sglang.requests=4"),
        f"engines.sglang.server={{stand_in={{die_once='{marker}',at=6}}}}",
    ]
    small = [
        *("backend.name=plain", "roles.actor.ranks=1", "run.steps=2", "cluster.offload=always", "eval.every=0"),
        *("checkpoint.every=0", "checkpoint.export=false", "extensions=[{name='jsonl'},{name='console'}]"),
        f"cluster.environment={{TMPDIR='{temporary}'}}",
    ]
    command = Command("train", write_small(tmp_path), f"run.dir={tmp_path}/run", *small, *engine, logs=tmp_path)
    with command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    assert marker.exists()
    told = " ".join(command.out.split())
    assert "engine-0 is replaced: engine-0: its server was killed by SIGKILL; its log" in told
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [step["step"] for step in steps] == [0, 1]
    for step in steps:
        assert step["rollout/logprob_diff"] < 1e-4  # of the server's log-probs to the trainer's, of the same weights
    # Servers lead sessions of their own, and have what they were told in the temporary directory.
    assert [path for path in temporary.iterdir() if path.name.startswith("corerl-sglang-")] == []
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if str(temporary).encode() in line]
