"""Whether an engine holds what was sent: a sum of bits of each tensor, taken on both sides.

A bucket's checksum says that it arrived; this says that it was loaded, under the right name and into the right place.
The sum of an integer for each element, its bit pattern, is the same however a tensor is fused with others or cut over
ranks: whoever holds a part of it adds its part. It does not tell in which order the elements lie.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import WeightSender

AT_ONCE = 2**24  # elements, which bounds the temporaries on a device
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def bit_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of each tensor's elements' bit patterns as signed integers, modulo 2**64 and signed.

    Sums of disjoint parts of a tensor, added in the same way, are its own.
    """
    if not tensors:
        return {}
    sums = torch.stack([_bit_sum(tensor) for tensor in tensors.values()]).tolist()  # one wait for the device
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
    """The first tensor that was loaded otherwise than it was sent, and how many more; "" where all are equal. What the
    engine does not tell of is not compared."""
    wrong = [name for name, value in sent.items() if loaded.get(name, value) != value]
    if not wrong:
        return ""
    name, others = wrong[0], len(wrong) - 1
    more = f" (and {others} other tensor{'s' * (others > 1)})" if others else ""
    return f"{name!r}{more}, whose bits sum to {loaded[name]:#x} there and were sent as {sent[name]:#x}"


class SummingSender(WeightSender):
    """The sender of `rank`; keeps the sums of what this rank sends through it, or rank 0 where each sends."""

    def __init__(self, sender: WeightSender, rank: int) -> None:
        super().__init__()
        self._sender = sender
        self._rank = rank
        self.sums: dict[str, int] = {}

    def sender_of(self, bucket: Bucket) -> int | None:
        return self._sender.sender_of(bucket)

    def begin(self, manifest: Manifest, version: int) -> None:
        self._sender.begin(manifest, version)

    def room(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._sender.room(numel, dtype)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if (self.sender_of(bucket) or 0) == self._rank:
            self.sums |= bit_sums(bucket.views(flat))  # before: the transport may have done with it afterwards
        self._sender.send(bucket, flat)

    def commit(self) -> Mapping[str, str]:
        engines = self._sender.commit()
        self.sent = self._sender.sent
        return engines

    def give_up(self, engine: str, version: int, reason: str) -> None:
        self._sender.give_up(engine, version, reason)

    def close(self) -> None:
        self._sender.close()
