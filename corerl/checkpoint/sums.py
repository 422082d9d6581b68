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

Look: TypeAlias = tuple[int, bool]  # the CRC-32 of a tensor's bytes; whether all values are finite


def look(tensor: torch.Tensor) -> Look:
    """Look at each value of a CPU tensor once. Only float32 values are looked at whether they are finite."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    checksum, sound = 0, True
    with np.errstate(invalid="ignore"):
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            checksum = zlib.crc32(piece, checksum)
            if tensor.dtype == torch.float32 and sound:
                values = piece.view(np.float32)
                # NaN anywhere makes both ends NaN. Intermediate results would take memory, and more time.
                sound = math.isfinite(values.min()) and math.isfinite(values.max())
    return checksum, sound


def look_at_all(tensors: Mapping[str, torch.Tensor], threads: int) -> dict[str, Look]:
    """The same for each tensor, in as many threads: zlib and numpy let others run."""
    if threads < 2 or len(tensors) < 2:
        return {name: look(tensor) for name, tensor in tensors.items()}
    # The largest ones first: begun last, one would keep a single thread busy while the others have nothing left.
    names = sorted(tensors, key=lambda name: -tensors[name].numel())
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-sums") as pool:
        found = dict(zip(names, pool.map(look, (tensors[name] for name in names)), strict=True))
    return {name: found[name] for name in tensors}


def threads_here() -> int:
    """How many threads of this process may look at tensors while its others work: those that torch may use, of which
    there are as many as the host's cores allow each of its processes."""
    return max(1, min(torch.get_num_threads(), THREADS))
