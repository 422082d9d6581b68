"""What worker extensions do on a CUDA device only: kernels in profiles, the allocator's peaks and its snapshots."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from corerl.errors import HookFailed
from corerl_observe.memory_recorder import MemoryRecorder
from corerl_observe.profiler import Profiler
from corerl_observe.specs import MemoryOptions, ProfilerOptions
from plugins.observe.tests.hosts import batch, host, step, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


class Allocates:
    """Holds so many bytes on the device for a moment of each step."""

    def __init__(self, size: int) -> None:
        self.size = size

    def forward_backward(self) -> Iterator[None]:
        torch.empty(self.size, dtype=torch.uint8, device="cuda")
        return (yield)


def test_a_profile_has_the_devices_kernels(tmp_path: Path) -> None:
    profiler = Profiler(options=ProfilerOptions(steps="1"), run_dir=str(tmp_path))
    run = host(tmp_path, "cuda", profiler=profiler)
    for index in range(2):
        train(run, batch(), step(index))
    events = json.loads((tmp_path / "profile/actor-0-step-1.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "CUDA" in (tmp_path / "profile/actor-0-step-1.txt").read_text()


def test_peaks_are_the_allocators_and_chosen_steps_leave_a_snapshot(tmp_path: Path) -> None:
    recorder = MemoryRecorder(options=MemoryOptions(snapshots="1"), run_dir=str(tmp_path))
    run = host(tmp_path, "cuda", memory=recorder, allocates=Allocates(256 * MIB))
    for index in range(2):
        train(run, batch(), step(index))
    run.shutdown("finished")
    told = [json.loads(line) for line in (tmp_path / "memory/actor-0.jsonl").read_text().splitlines()]
    assert all(each["of"] == "allocated on the device" for each in told)
    for each in told[1:]:  # what the libraries take for themselves is there to stay
        least = 256 * MIB if each["hook"] == "forward_backward" else 0
        assert least <= each["peak_bytes"] < least + 128 * MIB and each["held_bytes"] < 128 * MIB
    snapshot = pickle.loads((tmp_path / "memory/actor-0-step-1.pickle").read_bytes())
    assert any(event["size"] == 256 * MIB for trace in snapshot["device_traces"] for event in trace)
    assert not (tmp_path / "memory/actor-0-step-0.pickle").exists()


def test_a_device_without_memory_left_leaves_a_snapshot(tmp_path: Path) -> None:
    recorder = MemoryRecorder(options=MemoryOptions(on_out_of_memory=True), run_dir=str(tmp_path))
    run = host(tmp_path, "cuda", memory=recorder, allocates=Allocates(2**50))
    with pytest.raises(HookFailed, match="OutOfMemoryError"):
        train(run, batch(), step(0))
    run.shutdown("failed")
    assert (tmp_path / "memory/actor-0-forward_backward-out-of-memory.pickle").stat().st_size > 0
