"""Pack planned samples into micro-batches lazily, reading the rollout batch's arrays in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen

from corerl.data.plan import StepPlan
from corerl.types import Array, IntArray, MicroBatch, PackedBatch, SampleBatch, offsets_of


def pack(
    batch: SampleBatch, plan: StepPlan, dp_rank: int, *, sequence_multiple: int, columns: Sequence[str] | None = None
) -> PackedBatch:
    """One dp rank's share of a step. Micro-batches are built when iterated over, which can be repeated.

    Every micro-batch carries `weights` [T], scales[sample] * loss_mask, and `columns` of the batch; None takes all.
    Padding to `sequence_multiple` has token 0 and zeros in every column. A filler has its sample's tokens, with
    weights 0, loss_mask False and sample -1.
    """
    names = tuple(batch.columns) if columns is None else tuple(columns)
    unknown = [name for name in names if name not in batch.columns]
    if unknown:
        raise ValueError(f"the rollout batch has no column {unknown[0]!r}; it has: {', '.join(sorted(batch.columns))}")
    micro_batches = LazyMicroBatches(
        batch=batch,
        members=plan.micro_batches[dp_rank],
        filler=plan.filler[dp_rank],
        scales=plan.scales,
        sequence_multiple=sequence_multiple,
        columns=names,
    )
    return PackedBatch(micro_batches=micro_batches, count=len(micro_batches), temperature=batch.temperature)


@frozen(kw_only=True, eq=False)
class LazyMicroBatches:
    """Builds each micro-batch when a loop reaches it; every loop starts anew."""

    batch: SampleBatch
    members: tuple[IntArray, ...]  # [M] sample indices
    filler: tuple[bool, ...]  # [M]
    scales: Array  # [B]
    sequence_multiple: int
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self._build, self.members, self.filler)

    def _build(self, samples: IntArray, filler: bool) -> MicroBatch:
        lengths = self.batch.lengths[samples]
        padded = -(-lengths // self.sequence_multiple) * self.sequence_multiple
        cu_seqlens = offsets_of(padded)
        starts = self.batch.offsets[samples]
        # Slice by slice: an index for every token would double the memory and take several times as long.
        spans = list(zip(starts.tolist(), (starts + lengths).tolist(), (padded - lengths).tolist(), strict=True))

        def place(values: Array) -> Array:
            parts: list[Array] = []
            for start, end, padding in spans:
                parts.append(values[start:end])
                if padding:
                    parts.append(np.zeros((padding, *values.shape[1:]), dtype=values.dtype))
            return np.concatenate(parts)

        columns: dict[str, Array] = {name: place(self.batch.columns[name]) for name in self.columns}
        mask = place(self.batch.columns["loss_mask"]) & (not filler)
        if "loss_mask" in columns:
            columns["loss_mask"] = mask
        columns["weights"] = np.repeat(self.scales[samples], padded) * mask
        return MicroBatch(
            tokens=place(self.batch.tokens),
            positions=np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], padded),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            samples=np.full_like(samples, -1) if filler else samples,
            columns=columns,
        )
