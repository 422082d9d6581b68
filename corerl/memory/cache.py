"""What torch keeps of a device for the next tensors, given back."""

from __future__ import annotations

import torch


def empty_cache(device: torch.device) -> None:
    """Give the device all memory that no tensor lies in. On a CPU there is nothing to do.

    cuBLAS's workspaces go too, and are made again by the next product. Each is a tensor of torch's own, 32 MiB on an
    H200, cut from whatever segment had room, and `torch.cuda.empty_cache` keeps every segment that one lies in: 0.7 GiB
    for one of a step's activations.
    """
    if device.type != "cuda":
        return
    torch._C._cuda_clearCublasWorkspaces()  # pytorch/pytorch#184084 asks for a public name
    torch.cuda.empty_cache()
