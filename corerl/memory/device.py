"""How much device memory a process holds, as the driver counts it, what holds it, and how to hold less."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from corerl.memory.storage import resident_bytes
from corerl.types import MemoryKind

GIB = 2**30


@frozen(kw_only=True)
class Held:
    """Bytes in use on a device. All but `used` are this process's."""

    used: int  # by all processes, contexts included
    own: int | None  # by this process; None if the driver does not tell processes apart
    live: int  # in tensors
    cached: int  # in torch's cache
    total: int = 0  # that the device has; 0 for main memory

    @property
    def residual(self) -> int:
        """Bytes that this process holds, or if that is unknown, all processes."""
        return self.used if self.own is None else self.own

    def described(self, kinds: Mapping[MemoryKind, int]) -> str:
        """What holds the residual, in words; `kinds` are the bytes of the tensors of each kind."""
        parts = {f"tensors of {kind}": size for kind, size in kinds.items()}
        parts["other tensors"] = max(self.live - sum(kinds.values()), 0)
        parts["torch's cache"] = self.cached
        outside = "CUDA context, NCCL communicators and loaded kernels"
        if self.own is None:
            outside += ", and other processes on this device, which the driver cannot tell apart here"
        parts[outside] = max(self.residual - self.live - self.cached, 0)
        return "; ".join(f"{what}: {size / GIB:.3g} GiB" for what, size in parts.items() if size)


class DeviceMeter:
    """Measures one device. Keeps the driver's library, which takes a moment to load."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._processes = Nvml.open(device) if device.type == "cuda" else None

    def held(self, tensors: Iterable[torch.Tensor]) -> Held:
        """Measure the device. On a CPU, where a process's tensors cannot be separated from its other memory, count the
        distinct storages of `tensors`."""
        if self._device.type != "cuda":
            size = resident_bytes(tensors)
            return Held(used=size, own=size, live=size, cached=0)
        free, total = torch.cuda.mem_get_info(self._device)
        live, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        own = None if self._processes is None else self._processes.own_bytes()
        if own is not None and not reserved <= own <= total - free:
            own = None  # another process, whose host id equals this one's id in its container
        return Held(used=total - free, own=own, live=live, cached=reserved - live, total=total)


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, second version (nvml.h)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),  # bytes; all bits set if the driver does not know
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """The driver's management library. It uses the host's process ids, so it may not find a process in a container."""

    MOST = 256  # processes on one device

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, device: torch.device) -> Nvml | None:
        """Load the library for this device; None if it is not installed, or does not know the device."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            _ = library.nvmlDeviceGetComputeRunningProcesses_v3  # not in drivers before 510
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        except (OSError, AttributeError):
            return None
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return None
        return cls(library, handle)

    def own_bytes(self) -> int | None:
        """Bytes of the device that this process uses, its context included; None if unknown."""
        found, count = (_Process * self.MOST)(), ctypes.c_uint(self.MOST)
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle, ctypes.byref(count), found):
            return None
        for process in found[: count.value]:
            if process.pid == os.getpid() and process.used != ctypes.c_ulonglong(-1).value:
                return int(process.used)
        return None


def empty_cache(device: torch.device) -> None:
    """Give all memory that no tensor uses back to the device. Does nothing on a CPU.

    Also frees cuBLAS's workspaces, which the next matrix product allocates again. Each is a tensor of torch, 32 MiB on
    an H200, placed in any segment with room, and `torch.cuda.empty_cache` keeps every segment that holds one: 0.7 GiB
    if that was a segment of activations.
    """
    if device.type != "cuda":
        return
    torch._C._cuda_clearCublasWorkspaces()  # pytorch/pytorch#184084 asks for a public name
    torch.cuda.empty_cache()


def lone_rank_options(timeout: timedelta) -> Any:
    """`pg_options` for an NCCL group of one rank, which needs only one channel: its communicator then takes 10 MiB on
    an H200 instead of 388 MiB with NCCL's default number of channels."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = 1
    return options
