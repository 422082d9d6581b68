from __future__ import annotations

import pytest
import torch

from corerl.weights import checksum as module
from corerl.weights.checksum import checksum

MASK = 2**64 - 1


def reference(data: bytes) -> int:
    """The same sum in Python integers, word by word."""
    data += b"\0" * (-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        total += (word ^ (word >> 32)) * (2 * i + 1)
    return total


def signed(total: int) -> int:
    total &= MASK
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 40, 41, 100])
def test_the_checksum_equals_the_sum_in_python_integers(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 64)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for tensor in (flat, flat.to(torch.bfloat16)):
        data = bytes(tensor.view(torch.uint8).tolist())
        assert checksum(tensor) == signed(len(data) + reference(data))


def test_every_single_flipped_bit_changes_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 32)
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


def test_the_checksum_does_not_depend_on_how_much_is_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sums = set()
    for at_once in (8, 64, 2**20):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", at_once)
        sums.add(checksum(data))
    assert len(sums) == 1
