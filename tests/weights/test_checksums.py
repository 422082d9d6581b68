from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import xxhash

from corerl.weights import checksums as module
from corerl.weights.checksums import bit_sums, checksum, device_sum, difference

MASK = 2**64 - 1


def reference(data: bytes, width: int) -> int:
    """The device's sum in Python integers: of rows and of columns of `width` words."""
    size = len(data)
    data += b"\0" * (8 * width - size % (8 * width))
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    rows = [sum(words[at : at + width]) & MASK for at in range(0, len(words), width)]
    columns = [sum(words[column::width]) & MASK for column in range(width)]

    def weighted(sums: list[int]) -> int:
        spread = [(each ^ (each >> 32)) * module.SPREAD & MASK for each in sums]
        return sum((each ^ (each >> 32)) * (2 * index + 1) for index, each in enumerate(spread))

    return signed(size + weighted(rows) + weighted(columns) * module.COLUMNS)


def signed(total: int) -> int:
    total &= MASK
    return total - 2**64 if total >= 2**63 else total


def summed(flat: torch.Tensor) -> int:
    return int(device_sum(flat.view(torch.uint8)))


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 40, 41, 100])
def test_checksums_are_xxh3_on_hosts_and_sums_on_devices(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDTH", 4)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for tensor in (flat, flat.to(torch.bfloat16)):
        data = bytes(tensor.view(torch.uint8).tolist())
        assert checksum(tensor) == signed(xxhash.xxh3_64_intdigest(data))
        assert summed(tensor) == reference(data, 4)


@pytest.mark.parametrize("digest", [checksum, summed])
def test_a_view_at_an_odd_offset_has_its_copys_digest(digest: Callable[[torch.Tensor], int]) -> None:
    base = torch.randn(41)
    assert digest(base[1:]) == digest(base[1:].clone())


def test_sums_of_parts_add_up_and_a_single_bit_shows() -> None:
    fused = torch.randn(6, 4)
    parts = [fused[:1], fused[1:, :3], fused[1:, 3:]]
    assert sum(bit_sums({str(part.shape): part for part in parts}).values()) == bit_sums({"": fused})[""]
    changed = fused.clone()
    changed.view(torch.int32)[3, 2] ^= 1
    assert bit_sums({"": changed}) != bit_sums({"": fused})


def test_the_first_differing_tensor_is_named() -> None:
    sent = {"a": 1, "b": 2, "c": 255, "d": 4}
    assert difference(sent, {"a": 1, "b": 2, "z": 9}) == ""
    assert difference(sent, {"b": 2, "c": 16}) == "'c', whose bits sum to 0x10 in the engine, but to 0xff as sent"
    assert difference(sent, {"b": 0, "c": 0, "d": 0}).startswith("'b' (and 2 other tensors), whose bits sum to 0x0 ")
