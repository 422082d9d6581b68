"""How much device memory a process holds, as the driver counts it, what holds it, and how to hold less."""

from __future__ import annotations

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


def held_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> Held:
    """Measure a device. On a CPU, where a process's tensors cannot be separated from its other memory, count
    the distinct storages of `tensors`."""
    if device.type != "cuda":
        size = resident_bytes(tensors)
        return Held(used=size, own=size, live=size, cached=0)
    free, total = torch.cuda.mem_get_info(device)
    live, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    own = own_bytes(device)
    if own is not None and not reserved <= own <= total - free:
        own = None  # another process, whose host id equals this one's id in its container
    return Held(used=total - free, own=own, live=live, cached=reserved - live, total=total)


def own_bytes(device: torch.device) -> int | None:
    """Bytes of the device that this process uses, its context included; None without nvidia-ml-py, or where the driver
    does not find the process: it knows host process ids, which differ in a container."""
    try:
        import pynvml
    except ImportError:
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((each.usedGpuMemory for each in processes if each.pid == os.getpid()), None)


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
