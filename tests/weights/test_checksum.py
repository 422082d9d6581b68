from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import xxhash

from corerl.weights import checksum as module
from corerl.weights.checksum import checksum, device_sum

MASK = 2**64 - 1


def reference(data: bytes) -> int:
    """The device's sum in Python integers, word by word."""
    total = len(data)
    data += b"\0" * (-len(data) % 8)
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        total += (word ^ (word >> 32)) * (2 * i + 1)
    return signed(total)


def signed(total: int) -> int:
    total &= MASK
    return total - 2**64 if total >= 2**63 else total


def summed(flat: torch.Tensor) -> int:
    return int(device_sum(flat.view(torch.uint8)))


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 40, 41, 100])
def test_the_checksum_is_xxh3_on_the_host_and_the_sum_of_weighted_words_on_a_device(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for tensor in (flat, flat.to(torch.bfloat16)):
        data = bytes(tensor.view(torch.uint8).tolist())
        assert checksum(tensor) == signed(xxhash.xxh3_64_intdigest(data))
        assert summed(tensor) == reference(data)


@pytest.mark.parametrize("digest", [checksum, summed])
def test_every_single_flipped_bit_changes_the_digest(
    digest: Callable[[torch.Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 32)
    data = torch.randint(0, 256, (53,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = digest(data)
    seen = {whole}
    for bit in range(8 * len(data)):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest(flipped))
    assert len(seen) == 1 + 8 * len(data)


@pytest.mark.parametrize("digest", [checksum, summed])
def test_exchanged_words_and_a_longer_tail_of_zeros_change_the_digest(digest: Callable[[torch.Tensor], int]) -> None:
    words = torch.tensor([3, 3 - 2**63, 5], dtype=torch.int64)  # the first two differ in their sign bit alone
    assert len({digest(words), digest(words[[1, 0, 2]]), digest(words[[2, 1, 0]])}) == 3
    assert digest(torch.zeros(4)) != digest(torch.zeros(5))


@pytest.mark.parametrize("digest", [checksum, summed])
def test_a_view_at_an_odd_offset_has_the_digest_of_its_copy(digest: Callable[[torch.Tensor], int]) -> None:
    base = torch.randn(41)
    assert digest(base[1:]) == digest(base[1:].clone())


def test_the_sum_does_not_depend_on_how_much_is_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sums = set()
    for at_once in (8, 64, 2**20):
        monkeypatch.setattr(module, "CHUNK_BYTES", at_once)
        sums.add(summed(data))
    assert len(sums) == 1
