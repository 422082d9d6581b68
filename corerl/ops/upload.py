"""Arrays of the host on their way to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from corerl.types import Array


def upload(array: Array, device: torch.device | str) -> Tensor:
    """A copy on `device`, which may still be on its way there: what is computed with it on the current stream sees it.

    Nobody waits. A copy out of pageable memory would wait until the device has done all it was given before, and the
    device then for whatever the host prepares next. The array may be read-only, and change afterwards.
    """
    pinned = torch.device(device).type == "cuda"
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=dtype, device="cpu", pin_memory=pinned)
    np.copyto(host.numpy(), array)
    return host.to(device, non_blocking=pinned)
