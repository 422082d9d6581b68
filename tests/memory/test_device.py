from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from corerl.memory.device import GIB, DeviceMeter, Nvml


def test_a_machine_without_the_drivers_library_has_nothing_to_say_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert Nvml.open(torch.device("cuda", 0)) is None


def absent(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


class Library:
    """What the driver says of its processes: (pid, bytes)."""

    def __init__(self, processes: list[tuple[int, int]], status: int = 0) -> None:
        self.processes, self.status = processes, status

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        assert count._obj.value == len(found) == Nvml.MOST
        for slot, (pid, used) in zip(found, self.processes, strict=False):
            slot.pid, slot.used = pid, used
        count._obj.value = len(self.processes)
        return self.status


def test_a_driver_that_refuses_to_tell_is_believed() -> None:
    assert Nvml(Library([(os.getpid(), GIB)], status=3), None).own_bytes() is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A device of 80 GiB of which 50 are used: 4 by tensors, 1 by torch's cache."""
    library = Library([(os.getpid(), 6 * GIB), (1, 44 * GIB)])
    monkeypatch.setattr(Nvml, "open", lambda device: Nvml(library, None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    return library


def test_without_process_counts_the_residual_is_the_devices(gpu: Library) -> None:
    gpu.processes = [(1, 6 * GIB)]
    held = DeviceMeter(torch.device("cuda", 0)).held([])
    assert (held.own, held.residual) == (None, 50 * GIB)
    assert held.described({}).endswith("which the driver cannot tell apart here: 45 GiB")


@pytest.mark.parametrize("size", [2 * GIB, 51 * GIB])  # less than torch holds; more than anyone does
def test_another_process_of_the_same_id_is_not_taken_for_this_one(gpu: Library, size: int) -> None:
    gpu.processes = [(os.getpid(), size)]
    assert DeviceMeter(torch.device("cuda", 0)).held([]).own is None
