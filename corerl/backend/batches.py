"""Move micro-batches to a device, and per-token outputs back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from attrs import field, frozen

from corerl.algorithms.losses import LossInputs
from corerl.ops.packing import PackedSequences, upload
from corerl.types import BoolArray, ForwardResult, IntArray, MicroBatch, Output, offsets_of


@frozen(kw_only=True)
class DeviceBatch:
    """One micro-batch of T tokens as tensors."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    packing: PackedSequences
    passed: PackedSequences  # the same, or of the tokens that go through the model if sequences share prefixes
    columns: Mapping[str, torch.Tensor]  # each [T, ...]

    def loss_inputs(self, outputs: Mapping[Output, torch.Tensor]) -> LossInputs:
        return LossInputs(
            logprobs=outputs.get(Output.LOGPROBS),
            entropy=outputs.get(Output.ENTROPY),
            values=outputs.get(Output.VALUES),
            columns=self.columns,
            bounds=self.packing.cu_seqlens,
        )


def to_device(micro: MicroBatch, device: torch.device) -> DeviceBatch:
    """Copy a micro-batch to `device`; always a copy, since its arrays may be read-only views of the object store."""
    packing, prefixes = PackedSequences.of(micro.cu_seqlens, device), micro.prefix_lengths
    return DeviceBatch(
        tokens=upload(micro.tokens, device),
        positions=upload(micro.positions, device),
        packing=packing,
        passed=packing if prefixes is None or not prefixes.any() else packing.with_prefixes(prefixes),
        columns={name: upload(column, device) for name, column in micro.columns.items()},
    )


def unpadded(micro: MicroBatch) -> BoolArray:
    """[T] False in the padding after each sequence."""
    real: BoolArray = micro.positions < np.repeat(micro.lengths, np.diff(micro.cu_seqlens))
    return real


def counted(micro: MicroBatch) -> BoolArray:
    """[T] False in padding and in fillers."""
    counts: BoolArray = unpadded(micro) & np.repeat(micro.rows >= 0, np.diff(micro.cu_seqlens))
    return counts


@frozen
class OutputCollector:
    """Gathers the per-token outputs of micro-batches into one ForwardResult, without padding and fillers.

    Floats stay on their device until `finish`, so that no micro-batch waits for it. Routed experts, of which a token
    has many, go to the host at once.
    """

    rows: list[IntArray] = field(factory=list)
    lengths: list[IntArray] = field(factory=list)
    parts: dict[Output, list[torch.Tensor]] = field(factory=dict)

    def add(self, micro: MicroBatch, outputs: Mapping[Output, torch.Tensor]) -> None:
        real = micro.rows >= 0
        if not real.any():
            return
        keep = np.flatnonzero(counted(micro))
        self.rows.append(micro.rows[real])
        self.lengths.append(micro.lengths[real])
        for output, values in outputs.items():
            kept = values.detach().index_select(0, upload(keep, values.device))
            self.parts.setdefault(output, []).append(kept.float() if kept.is_floating_point() else kept.cpu())

    def finish(self, wanted: tuple[Output, ...]) -> ForwardResult:
        return ForwardResult(
            rows=np.concatenate([np.zeros(0, np.int64), *self.rows]),
            offsets=offsets_of(np.concatenate([np.zeros(0, np.int64), *self.lengths])),
            outputs={
                output: torch.cat(parts).cpu().numpy() if (parts := self.parts.get(output)) else np.zeros(0, np.float32)
                for output in wanted
            },
        )
