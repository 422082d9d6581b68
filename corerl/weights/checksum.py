"""A sum over the bits of a buffer that travels, which every flipped bit and every exchange changes."""

from __future__ import annotations

import torch

CHUNK_BYTES = 8 * 2**20  # bounds the temporaries
MULTIPLIER = 6364136223846793005  # odd, so that multiplying modulo 2**64 loses nothing (Knuth's MMIX generator)


def checksum(flat: torch.Tensor) -> int:
    """A signed 64-bit sum over the bytes of `flat`, computed on its device; one transfer to the host at the end.

    Each 8-byte word goes through a bijection, then times an odd number that grows with its position: any change within
    one word changes the sum, and so does, barring coincidence, every exchange of words.
    """
    data = flat.detach().reshape(-1).view(torch.uint8)
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
        total = total * MULTIPLIER + (mixed * weights[: words.numel()]).sum()
    return int(total.item())
