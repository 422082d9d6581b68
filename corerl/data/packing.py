"""Pack planned samples into micro-batches lazily, reading the rollout batch's arrays in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from corerl.data.plan import StepShare
from corerl.types import Array, MicroBatch, PackedBatch, SampleBatch, offsets_of


def pack(
    batch: SampleBatch, share: StepShare, *, sequence_multiple: int, columns: Sequence[str] | None = None
) -> PackedBatch:
    """One dp rank's share of a step. Micro-batches are built when iterated over, which can be repeated. `batch` are the
    samples that the share's rows count.

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
        share=share,
        sequence_multiple=sequence_multiple,
        columns=names,
    )
    return PackedBatch(
        micro_batches=micro_batches,
        count=len(micro_batches),
        temperature=batch.temperature,
        step_tokens=share.step_tokens,
    )


@frozen(kw_only=True, eq=False)
class LazyMicroBatches:
    """Builds each micro-batch when a loop reaches it; it can be looped over again."""

    batch: SampleBatch
    share: StepShare
    sequence_multiple: int
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.share.filler)

    def __iter__(self) -> Iterator[MicroBatch]:
        spans = (slice(begin, end) for begin, end in pairwise(self.share.offsets.tolist()))
        return map(self._build, spans, self.share.filler.tolist())

    def _build(self, chosen: slice, filler: bool) -> MicroBatch:
        rows, samples = self.share.rows[chosen], self.share.samples[chosen]
        lengths = self.batch.offsets[rows + 1] - self.batch.offsets[rows]
        padded = -(-lengths // self.sequence_multiple) * self.sequence_multiple
        cu_seqlens = offsets_of(padded)
        starts = self.batch.offsets[rows]
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
        columns["weights"] = np.repeat(self.share.scales[chosen], padded) * mask
        return MicroBatch(
            tokens=place(self.batch.tokens),
            positions=np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], padded),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            samples=np.full_like(samples, -1) if filler else samples,
            columns=columns,
        )
