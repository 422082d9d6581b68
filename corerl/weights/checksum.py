"""What tells a buffer that has travelled from one that was damaged on its way."""

from __future__ import annotations

import torch
import xxhash

CHUNK_BYTES = 64 * 2**20  # bounds the temporaries on a device; the sum is the same for any size


def checksum(flat: torch.Tensor) -> int:
    """A signed 64-bit digest of the bytes of `flat`, which is contiguous; computed where it lies.

    In host memory it is XXH3, which goes at the memory's speed; on a device it is `device_sum`, and eight bytes come to
    the host. So two digests can only be compared where both buffers were of one kind.
    """
    data = flat.detach().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return int.from_bytes(xxhash.xxh3_64_digest(data.numpy().data), "big", signed=True)
    return int(device_sum(data).item())


def device_sum(data: torch.Tensor) -> torch.Tensor:
    """A sum over the bytes `data` that every flipped bit and every exchange changes; an int64 scalar on its device.

    Each 8-byte word goes through a bijection, then times an odd number that grows with its position: any change within
    one word changes the sum, and so does, barring coincidence, every exchange of words.
    """
    size = data.numel()
    weights = torch.arange(1, 2 * ((min(size, CHUNK_BYTES) + 7) // 8), 2, dtype=torch.int64, device=data.device)
    total = torch.full((), size, dtype=torch.int64, device=data.device)
    for start in range(0, size, CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        if piece.numel() % 8:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8))
        elif piece.data_ptr() % 8 or piece.storage_offset() % 8:
            piece = piece.clone()  # 8-byte words need 8-byte alignment
        words = piece.view(torch.int64)
        # Folds the upper half into the lower one: without it, exchanging two words that differ in their sign bit alone
        # would go unnoticed, since all weights are odd and their differences even.
        mixed = words ^ ((words >> 32) & 0xFFFFFFFF)
        total += (mixed * weights[: words.numel()]).sum() + mixed.sum() * (2 * (start // 8))  # its place in the whole
    return total
