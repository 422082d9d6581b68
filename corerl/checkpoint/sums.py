"""The checksums of tensors, and whether their values are finite, by several threads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch

PIECE = 2**24  # bytes from one call to the next: each takes the interpreter's lock, for which the rank's kernels wait
THREADS = 8  # at most: a few read memory as fast as all cores would

Checksum: TypeAlias = tuple[int, bool]  # the CRC-32 of a tensor's bytes; whether all values are finite


def checksum(tensor: torch.Tensor) -> Checksum:
    """Read each value of a CPU tensor once. Only float32 values are checked to be finite."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    crc32, sound = 0, True
    with np.errstate(invalid="ignore"):
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            crc32 = zlib.crc32(piece, crc32)
            if tensor.dtype == torch.float32 and sound:
                values = piece.view(np.float32)
                # NaN anywhere makes both ends NaN. Intermediate results would take memory, and more time.
                sound = math.isfinite(values.min()) and math.isfinite(values.max())
    return crc32, sound


def checksums(tensors: Mapping[str, torch.Tensor], threads: int) -> dict[str, Checksum]:
    """The same for each tensor, in as many threads: zlib and numpy let others run."""
    if threads < 2 or len(tensors) < 2:
        return {name: checksum(tensor) for name, tensor in tensors.items()}
    # The largest ones first: begun last, one would keep a single thread busy while the others have nothing left.
    names = sorted(tensors, key=lambda name: -tensors[name].numel())
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-sums") as pool:
        found = dict(zip(names, pool.map(checksum, (tensors[name] for name in names)), strict=True))
    return {name: found[name] for name in tensors}


def threads_here() -> int:
    """How many threads may compute checksums while others work: as many as torch may use, which is this process's
    share of the host's cores."""
    return max(1, min(torch.get_num_threads(), THREADS))
