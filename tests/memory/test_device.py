from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from corerl.memory.device import GIB, held_on, own_bytes

GPU = torch.device("cuda", 0)


class Refusal(Exception):
    """As of a driver that does not answer."""


class Driver(ModuleType):
    """In place of pynvml: what the driver says of its processes, (pid, bytes)."""

    NVMLError = Refusal

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.processes: list[tuple[int, int | None]] = [(1, 44 * GIB), (os.getpid(), 6 * GIB)]
        self.refuses = False

    def nvmlInit(self) -> None:
        if self.refuses:
            raise Refusal

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-7f"
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        assert handle == "handle"
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A device of 80 GiB of which 50 are used: 4 by tensors, 1 by torch's cache."""
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7f"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    return driver


def test_the_residual_is_this_processs_where_the_driver_knows_it(gpu: Driver) -> None:
    held = held_on(GPU, [])
    assert (held.own, held.residual, held.used, held.cached) == (6 * GIB, 6 * GIB, 50 * GIB, GIB)


def test_without_process_counts_the_residual_is_the_devices(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.processes = [(1, 6 * GIB)]
    held = held_on(GPU, [])
    assert (held.own, held.residual) == (None, 50 * GIB)
    assert held.described({}).endswith("which the driver cannot tell apart here: 45 GiB")
    gpu.processes = [(os.getpid(), None)]
    assert own_bytes(GPU) is None
    gpu.refuses = True
    assert own_bytes(GPU) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert own_bytes(GPU) is None


@pytest.mark.parametrize("size", [2 * GIB, 51 * GIB])  # less than torch holds; more than anyone does
def test_another_process_of_the_same_id_is_not_taken_for_this_one(gpu: Driver, size: int) -> None:
    gpu.processes = [(os.getpid(), size)]
    assert held_on(GPU, []).own is None
