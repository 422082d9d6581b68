"""What tells a buffer that has travelled from one that was damaged on its way."""

from __future__ import annotations

import torch
import xxhash

WIDTH = 1024  # words of a row
SPREAD = 0x1E3779B97F4A7C15  # any odd number with its bits all over it
COLUMNS = 0x3F58476D1CE4E5B9  # another, for columns to weigh otherwise than rows


def checksum(flat: torch.Tensor) -> int:
    """A signed 64-bit digest of the bytes of `flat`, which is contiguous; computed where it lies.

    In host memory it is XXH3, which goes at the memory's speed; on a device it is `device_sum`, and eight bytes come to
    the host. So two digests can only be compared where both buffers were of one kind.
    """
    return int(digest(flat))


def digest(flat: torch.Tensor) -> torch.Tensor:
    """The checksum as an int64 scalar where `flat` lies: on a device nothing waits for it."""
    data = flat.detach().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        found = int.from_bytes(xxhash.xxh3_64_digest(data.numpy().data), "big", signed=True)
        return torch.tensor(found, dtype=torch.int64)
    return device_sum(data)


class Digest:
    """A checksum on its way to the host: it is not waited for before it is asked for."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._found = digest(flat)
        self._done: torch.cuda.Event | None = None
        if flat.device.type == "cpu":
            return
        on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
        self._found = on_host.copy_(self._found, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    @property
    def ready(self) -> bool:
        """Whether it is there, and with it what was to be written to `flat` before."""
        return self._done is None or self._done.query()

    def value(self) -> int:
        """The number that `checksum` gives."""
        if self._done is not None:
            self._done.synchronize()
        return int(self._found)


def device_sum(data: torch.Tensor) -> torch.Tensor:
    """A sum over the bytes `data` that flipped bits and exchanged words change; an int64 scalar on its device.

    The 8-byte words stand in rows of `WIDTH`. Each row's sum and each column's goes through a bijection, then times an
    odd number of its own: a word that changes changes its row and its column, and words that change places leave one of
    the two. All of it modulo 2**64, so that another change may go unseen by coincidence alone. The device's memory is
    read twice, and next to nothing is written; elementwise arithmetic would go through it a dozen times.
    """
    size = data.numel()
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()  # 8-byte words need 8-byte alignment
    whole = size // (8 * WIDTH) * (8 * WIDTH)
    last = torch.nn.functional.pad(data[whole:], (0, 8 * WIDTH - (size - whole))).view(torch.int64)  # [WIDTH]
    grid = data[:whole].view(torch.int64).view(-1, WIDTH)
    rows = torch.cat([grid.sum(1), last.sum().reshape(1)])
    columns = grid.sum(0) + last
    return _weighted(rows) + _weighted(columns) * COLUMNS + size


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    # Upper bits must reach lower ones: without that, an exchange that moves a sign bit alone would go unnoticed, since
    # all weights are odd and their differences even.
    mixed = _folded(_folded(sums) * SPREAD)
    return (mixed * torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=sums.device)).sum()


def _folded(words: torch.Tensor) -> torch.Tensor:
    """A bijection: the upper half is added to the lower one, bit by bit."""
    return words ^ ((words >> 32) & 0xFFFFFFFF)
