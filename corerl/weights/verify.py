"""Verify that an engine holds what was sent, by comparing each tensor's sum of bit patterns on both sides.

A bucket's checksum shows that it arrived; this shows that it was loaded, under the right name and into the right place.
Each element's bit pattern counts as an integer. Their sum is the same however a tensor is fused with others or split
over ranks, since each rank adds its part. It does not detect a wrong order of elements.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

AT_ONCE = 2**24  # elements; bounds the temporaries on a device
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


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
