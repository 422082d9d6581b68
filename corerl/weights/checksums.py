"""Show that weights arrived, and that they were loaded.

A bucket's checksum detects damage in transit. The bit sums of each tensor, compared on both sides, show that an engine
has loaded what was sent under the right name and into the right place. Each element's bit pattern counts as an integer.
Their sum is the same however a tensor is fused with others or split over ranks, since each rank adds its part. It does
not detect a wrong order of elements.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

WIDTH = 1024  # words per row
SPREAD = 0x1E3779B97F4A7C15  # any odd number with well-spread bits
COLUMNS = 0x3F58476D1CE4E5B9  # another one, so that columns are weighted differently from rows
AT_ONCE = 2**24  # elements; bounds the temporaries on a device
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def checksum(flat: torch.Tensor) -> int:
    """A signed 64-bit digest of the bytes of contiguous `flat`, computed in place.

    In host memory it is XXH3, at memory speed; on a device it is `device_sum`, and only eight bytes reach the host.
    Digests are therefore only comparable between buffers of the same kind.
    """
    return int(digest(flat))


def digest(flat: torch.Tensor) -> torch.Tensor:
    """The checksum as an int64 scalar on `flat`'s device; does not synchronize."""
    data = flat.detach().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        found = int.from_bytes(xxhash.xxh3_64_digest(data.numpy().data), "big", signed=True)
        return torch.tensor(found, dtype=torch.int64)
    return device_sum(data)


def device_sum(data: torch.Tensor) -> torch.Tensor:
    """A sum over the bytes `data` that detects flipped bits and swapped words; an int64 scalar on its device.

    The 8-byte words form rows of `WIDTH`. The sum of each row and each column goes through a bijection and is
    multiplied by its own odd number: a changed word changes its row and column sums, and swapped words change row or
    column. All modulo 2**64, so any other change goes undetected only by coincidence. Reads device memory twice and
    writes next to nothing; elementwise arithmetic would pass over it a dozen times.
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
    # Upper bits must affect lower ones: otherwise a swap that moves only a sign bit would go unnoticed, since all
    # weights are odd and their differences even.
    mixed = _folded(_folded(sums) * SPREAD)
    return (mixed * torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=sums.device)).sum()


def _folded(words: torch.Tensor) -> torch.Tensor:
    """A bijection: XOR the upper half into the lower half."""
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def bit_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Sum the bit patterns of each tensor's elements as signed integers, modulo 2**64, as a signed result.

    Adding the sums of a tensor's disjoint parts in the same way gives the tensor's sum.
    """
    if not tensors:
        return {}
    sums = torch.stack([_bit_sum(tensor) for tensor in tensors.values()]).tolist()  # a single device synchronization
    return dict(zip(tensors, sums, strict=True))


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on the tensor's device."""
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    rows = bits.unsqueeze(0) if bits.ndim == 0 else bits
    for piece in rows.split(max(1, AT_ONCE * len(rows) // max(1, rows.numel()))):
        total += piece.sum(dtype=torch.int64)
    return total


def difference(sent: Mapping[str, int], loaded: Mapping[str, int]) -> str:
    """Describe the first tensor whose loaded sum differs from the sent one, and count the others; "" if none differs.
    Tensors that the engine does not report are not compared."""
    wrong = [name for name, value in sent.items() if loaded.get(name, value) != value]
    if not wrong:
        return ""
    name, others = wrong[0], len(wrong) - 1
    more = f" (and {others} other tensor{'s' * (others > 1)})" if others else ""
    return f"{name!r}{more}, whose bits sum to {loaded[name]:#x} in the engine, but to {sent[name]:#x} as sent"
