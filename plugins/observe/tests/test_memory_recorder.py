from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corerl.errors import CorerlError
from corerl.types import MemoryKind, Output
from corerl_observe.memory_recorder import MemoryRecorder, ResidentMeter
from corerl_observe.specs import MemoryOptions
from plugins.observe.tests.hosts import LOSS, batch, host, step, train

MIB = 2**20


class Wasteful:
    """Holds so many bytes for a moment of the training passes that it is told, counted from 0."""

    def __init__(self, taken: dict[int, int]) -> None:
        self.taken, self.calls = taken, 0

    def forward_backward(self) -> Iterator[None]:
        bytearray(self.taken.get(self.calls, 0))
        self.calls += 1
        return (yield)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "memory/actor-0.jsonl").read_text().splitlines()]


def test_each_call_of_a_hook_leaves_its_own_peak(tmp_path: Path) -> None:
    recorder = MemoryRecorder(options=MemoryOptions(), run_dir=str(tmp_path))
    recorded = host(tmp_path, memory=recorder, wasteful=Wasteful({1: 256 * MIB}))
    for index in range(3):
        train(recorded, batch(), step(index))
    recorded.forward(batch(), (Output.LOGPROBS,), "")
    recorded.sleep({MemoryKind.OPTIMIZER})
    recorded.wake_up({MemoryKind.OPTIMIZER})
    recorded.shutdown("finished")
    told = records(tmp_path)
    halves = ["forward_backward", "optimizer_step"]
    assert [each["hook"] for each in told] == ["init", *halves * 3, "forward", "sleep", "wake_up"]
    passes, steps = told[1:7:2], told[2:7:2]
    assert [each.get("optimizer_step") for each in steps] == [0, 1, 2]
    peaks = [each["peak_bytes"] for each in passes]
    if told[0]["since"] == "call":
        assert peaks[1] - peaks[0] > 200 * MIB and peaks[1] - peaks[2] > 200 * MIB
        assert passes[1]["held_bytes"] < peaks[1] - 200 * MIB
    assert all(each["of"] == "resident set of the process" for each in told)


def test_a_steps_peak_is_that_of_its_highest_call(tmp_path: Path) -> None:
    recorder = MemoryRecorder(options=MemoryOptions(), run_dir=str(tmp_path))
    recorded = host(tmp_path, memory=recorder, wasteful=Wasteful({0: 256 * MIB}))
    shown = []
    for index in range(2):
        for last in (False, True):
            recorded.forward_backward(batch(), LOSS, (), last)
        shown.append(recorded.optimizer_step(step(index), 1.0).metrics["peak_memory_gib"].value)
    recorded.shutdown("finished")
    told = records(tmp_path)[1:]
    peaks = [each["peak_bytes"] / 2**30 for each in told]
    assert shown == [max(peaks[:3]), max(peaks[3:])]
    if told[0]["since"] == "call":
        assert shown[0] == peaks[0] > peaks[2] + 0.2 and shown[1] < shown[0] - 0.2


def test_a_call_that_fails_is_written_too(tmp_path: Path) -> None:
    recorded = host(tmp_path, memory=MemoryRecorder(options=MemoryOptions(), run_dir=str(tmp_path)))
    (tmp_path / "file").touch()
    with pytest.raises(CorerlError, match="file"):
        recorded.save(str(tmp_path / "file" / "below"), step(0), background=False)
    recorded.shutdown("failed")
    assert [(each["hook"], "error" in each) for each in records(tmp_path)] == [("init", False), ("save", True)]


def test_a_peak_that_cannot_be_reset_is_the_processs(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    (tmp_path / "clear_refs").mkdir()  # cannot be written to
    meter = ResidentMeter(str(tmp_path))
    meter.begin()
    assert (meter.since, meter.read()) == ("start of the process", (2 * MIB, MIB))


def test_ranks_that_are_not_chosen_measure_nothing(tmp_path: Path) -> None:
    recorder = MemoryRecorder(options=MemoryOptions(ranks=(1,)), run_dir=str(tmp_path))
    result = train(host(tmp_path, memory=recorder), batch(), step(0))
    assert "peak_memory_gib" not in result.metrics and list(tmp_path.iterdir()) == []
