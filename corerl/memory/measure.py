"""How much memory a process still holds on its device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from corerl.memory.storage import resident_bytes


def device_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes used on `device`: as the driver reports it on a GPU (all its processes together, contexts included), and on
    a CPU, where nobody separates a process's tensors from the rest, the storages of `tensors`, each counted once."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resident_bytes(tensors)
