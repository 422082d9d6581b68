from __future__ import annotations

import pytest
import torch

from corerl.weights import checksum as module
from corerl.weights.checksum import checksum

MASK = 2**64 - 1


def reference(data: bytes, chunk: int) -> int:
    """The same sum in Python integers, word by word."""
    total = len(data)
    for start in range(0, len(data), chunk):
        piece = data[start : start + chunk]
        piece += b"\0" * (-len(piece) % 8)
        part = 0
        for i in range(len(piece) // 8):
            word = int.from_bytes(piece[8 * i : 8 * i + 8], "little")
            part += (word ^ (word >> 32)) * (2 * i + 1)
        total = (total * module.MULTIPLIER + part) & MASK
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 40, 41, 100])
def test_the_checksum_equals_the_sum_in_python_integers(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for tensor in (flat, flat.to(torch.bfloat16)):
        data = bytes(tensor.view(torch.uint8).tolist())
        assert checksum(tensor) == reference(data, 64)


def test_every_single_flipped_bit_changes_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 32)
    data = torch.randint(0, 256, (53,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = checksum(data)
    seen = {whole}
    for bit in range(8 * len(data)):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(checksum(flipped))
    assert len(seen) == 1 + 8 * len(data)


def test_exchanged_words_and_a_longer_tail_of_zeros_change_the_checksum() -> None:
    words = torch.tensor([3, 3 - 2**63, 5], dtype=torch.int64)  # the first two differ in their sign bit alone
    assert len({checksum(words), checksum(words[[1, 0, 2]]), checksum(words[[2, 1, 0]])}) == 3
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(5))


def test_a_view_at_an_odd_offset_has_the_checksum_of_its_copy() -> None:
    base = torch.randn(41)
    assert checksum(base[1:]) == checksum(base[1:].clone())
