"""Copy host arrays to a device without waiting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from corerl.types import Array


def upload(array: Array, device: torch.device | str) -> Tensor:
    """Copy to `device` without waiting; work on the current stream sees the finished copy.

    A copy from pageable memory would block the host until the device finishes its queue, and the device would then
    idle while the host prepares more. The array may be read-only, and may change afterwards.
    """
    pinned = torch.device(device).type == "cuda"
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=dtype, device="cpu", pin_memory=pinned)
    np.copyto(host.numpy(), array)
    return host.to(device, non_blocking=pinned)
