from __future__ import annotations

import struct

import pytest
import torch

from corerl.weights import verify
from corerl.weights.manifest import Bucket, build_manifest
from corerl.weights.verify import SummingSender, bit_sums, difference
from corerl_testing.inprocess import InProcessSender


def reference(tensor: torch.Tensor) -> int:
    """Element by element in Python's integers."""
    size = tensor.element_size()
    data = bytes(tensor.reshape(-1).contiguous().view(torch.uint8).tolist())
    total = sum(value for (value,) in struct.iter_unpack({1: "<b", 2: "<h", 4: "<i"}[size], data)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("at_once", [7, 2**24])
def test_a_sum_is_that_of_all_elements_bits_in_any_layout(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_first_tensor_that_differs_is_named_and_what_is_not_told_is_not_compared() -> None:
    sent = {"a": 1, "b": 2, "c": 255, "d": 4}
    assert difference(sent, {"a": 1, "b": 2, "z": 9}) == ""
    assert difference(sent, {"b": 2, "c": 16}) == "'c', whose bits sum to 0x10 in the engine, but to 0xff as sent"
    assert difference(sent, {"b": 0, "c": 0, "d": 0}).startswith("'b' (and 2 other tensors), whose bits sum to 0x0 ")


def test_sums_are_of_what_was_sent_and_the_sender_sends_it() -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.randn(5)}
    manifest = build_manifest(
        [(name, tuple(each.shape)) for name, each in tensors.items()], dtype="float32", bucket_bytes=28
    )
    arrived: dict[str, torch.Tensor] = {}
    sender = SummingSender(InProcessSender(lambda got: arrived.update({k: v.clone() for k, v in got.items()})), 0)
    sender.begin(manifest, 1)
    for bucket in manifest.buckets:
        sender.send(bucket, torch.cat([tensors[entry.name].flatten() for entry in bucket.entries]))
    assert sender.commit() == {"engine-0": ""}
    assert len(manifest.buckets) == 2 and sorted(arrived) == ["a", "b", "c"]
    assert sender.sums == {name: reference(tensor) for name, tensor in tensors.items()}


class Elsewhere(InProcessSender):
    """Sends each bucket from the rank that `senders` names for it."""

    def __init__(self, senders: list[int | None]) -> None:
        super().__init__(lambda _: None)
        self.senders = senders

    def sender_of(self, bucket: Bucket) -> int | None:
        return self.senders[bucket.index]


@pytest.mark.parametrize(
    ("senders", "summed"),
    [([0, 0], ["ab", ""]), ([0, 1], ["a", "b"]), ([1, 1], ["", "ab"]), ([None, None], ["ab", ""])],
)
def test_each_tensor_is_summed_on_one_rank(senders: list[int | None], summed: list[str]) -> None:
    manifest = build_manifest([("a", (3,)), ("b", (3,))], dtype="float32", bucket_bytes=12)
    found = []
    for rank in range(2):
        sender = SummingSender(Elsewhere(senders), rank)
        sender.begin(manifest, 1)
        for bucket in manifest.buckets:
            if sender.sender_of(bucket) in (None, rank):
                sender.send(bucket, torch.ones(3))
        found.append("".join(sender.sums))
    assert found == summed
