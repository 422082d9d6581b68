"""Give the memory that torch caches back to the device."""

from __future__ import annotations

import torch


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
