"""Keep small what a process holds of a device besides its tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


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
