"""W&B offline: what it would send later is read back from its own file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

pytestmark = pytest.mark.processes

PROGRAM = """
import sys
from corerl_observe.specs import WandbOptions
from corerl_observe.weights_and_biases import WeightsAndBiases
from tests.observability.run import started, steps, whole

run_dir, first = sys.argv[1], int(sys.argv[2])
options = WandbOptions(mode="offline", project="sorting", tags=("rl",), samples_every=2)
extension = WeightsAndBiases(options=options, run_dir=run_dir)
events = [started(run_dir, first_step=first), *steps(first, 4)] if first else list(whole(run_dir))
for event in events:
    extension.observe(event)
extension.shutdown("finished")
"""
ROOT = Path(__file__).resolve().parents[3]


def track(run_dir: Path, first_step: int = 0) -> None:
    """In a process of its own: W&B leaves a service behind until its process ends."""
    command = [sys.executable, "-c", PROGRAM, str(run_dir), str(first_step)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)


def read(file: Path) -> list[Any]:
    """The records of W&B's own file: LevelDB's log format (blocks of 32 KiB; checksum, length and kind before each part
    of a record) behind a header of 7 bytes, each record a message of W&B's."""
    data, at, whole, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def rows(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]


def test_numbers_config_answers_and_one_id_are_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("[train]\nbetas = [0.9, 0.95]\n")
    track(run_dir)
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    records = read(file)
    run = next(record for record in records if record.HasField("run")).run
    assert (run.project, run.display_name, list(run.tags)) == ("sorting", "first", ["rl"])
    config = {item.key: item.value_json for record in records for item in record.config.update}
    config |= {item.key: item.value_json for item in run.config.update}
    assert json.loads(config["train"]) == {"betas": [0.9, 0.95]}
    told = rows(records)
    losses = [(row["rollout_step"], row["train/loss"]) for row in told if "train/loss" in row]
    assert losses == [(step, -0.01 * (step + 1)) for step in range(4)]
    assert [row["rollout_step"] for row in told if "samples/rollout/path" in row] == [0, 2]
    assert [row["rollout_step"] for row in told if "samples/held-out/path" in row] == [0, 2, 4]
    tables = [json.loads(path.read_text()) for path in run_dir.glob("wandb/offline-run-*/files/media/table/samples/*")]
    assert ["35018>", "01358", "01358", 1.0] in [row for table in tables for row in table["data"]]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]

    track(run_dir, first_step=2)
    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    again = next(record for record in read(files[-1]) if record.HasField("run")).run
    assert len(files) == 2 and again.run_id == run.run_id == json.loads((run_dir / "wandb.json").read_text())["run_id"]
    assert [row["rollout_step"] for row in rows(read(files[-1])) if "train/loss" in row] == [2, 3]
