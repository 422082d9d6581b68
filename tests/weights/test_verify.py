from __future__ import annotations

import struct

import pytest
import torch

from corerl.weights import verify
from corerl.weights.verify import bit_sums, difference


def reference(tensor: torch.Tensor) -> int:
    """Element by element in Python's integers."""
    size = tensor.element_size()
    data = bytes(tensor.reshape(-1).contiguous().view(torch.uint8).tolist())
    total = sum(value for (value,) in struct.iter_unpack({1: "<b", 2: "<h", 4: "<i"}[size], data)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("at_once", [7, 2**24])
def test_bit_sums_do_not_depend_on_layout(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "AT_ONCE", at_once)
    base = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = {"whole": base, "column": base[:, 2], "turned": base.T, "scalar": base[1, 1], "none": base[:0]}
    assert bit_sums(tensors) == {name: reference(tensor) for name, tensor in tensors.items()}


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
