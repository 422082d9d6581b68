"""Split a rollout batch into optimizer steps, dp ranks and micro-batches, first as indices, and pack a rank's shard of
these samples lazily, reading the batch's arrays in place."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from corerl.data.prefixes import Trees, groups_in_order, in_trees, prefix_lengths
from corerl.errors import ConfigError, DataError
from corerl.pictures import Picture
from corerl.types import (
    PICTURE,
    Array,
    BoolArray,
    FloatArray,
    IntArray,
    MicroBatch,
    PackedBatch,
    ParallelLayout,
    SampleBatch,
    offsets_of,
)

_NONE: IntArray = np.zeros(0, dtype=np.int64)

WORTH = 1 / 16  # of the tokens of a micro-batch: fewer in common than that are not shared, since attention reads copies

UNEVEN = 1.05  # times as many tokens on the fullest rank, for which fewer ranks encode the same picture

AGGREGATIONS = ("token-mean", "sequence-mean", "constant-length")


@frozen(kw_only=True, eq=False)
class StepShard:
    """One dp rank's part of a StepPlan, of n sequences in M micro-batches: what its ranks get with the samples."""

    rows: IntArray  # [n] indices in the rollout batch
    given_rows: IntArray  # [n] the same as indices in the part of the batch that the ranks are given
    scales: FloatArray  # [n]
    offsets: IntArray  # [M + 1] micro-batch m has given_rows[offsets[m]:offsets[m + 1]]
    filler: BoolArray  # [M]
    step_tokens: int = 0  # of the StepPlan
    shares_prefixes: bool = False  # of the StepPlan


@frozen(kw_only=True, eq=False)
class StepPlan:
    """One pass of chosen samples through the model, which the driver cuts into a shard for each dp rank."""

    micro_batches: tuple[tuple[IntArray, ...], ...]  # [dp_size][M] row indices; M is equal for all dp ranks
    filler: tuple[tuple[bool, ...], ...]  # [dp_size][M] True: real tokens with weight 0, to equalize M among ranks
    scales: FloatArray  # [B] token weight = scales[row] * loss_mask; holds 1 / denominator; 0 outside this step
    step_tokens: int = 0  # prompts included, on all dp ranks; 0 for what is only a part of a step
    shares_prefixes: bool = False  # as the layout of the ranks

    def rows(self, dp_ranks: Collection[int]) -> IntArray:
        """[n] the rows that these dp ranks read, fillers included, in ascending order."""
        read = [members for dp_rank in dp_ranks for members in self.micro_batches[dp_rank]]
        return np.unique(np.concatenate([_NONE, *read]))

    @property
    def members(self) -> IntArray:
        """[n] the rows that are passed, fillers not counted, in ascending order."""
        every = zip(sum(self.micro_batches, ()), sum(self.filler, ()), strict=True)
        return np.unique(np.concatenate([_NONE, *(members for members, filler in every if not filler)]))

    def shard_of(self, dp_rank: int, given: IntArray | None = None) -> StepShard:
        """The part of a dp rank that is given only the rows `given`, in ascending order; None: all of them."""
        micro_batches = self.micro_batches[dp_rank]
        rows = np.concatenate([_NONE, *micro_batches])
        return StepShard(
            rows=rows,
            given_rows=rows if given is None else np.searchsorted(given, rows),
            scales=self.scales[rows],
            offsets=offsets_of([len(members) for members in micro_batches]),
            filler=np.array(self.filler[dp_rank], dtype=np.bool_),
            step_tokens=self.step_tokens,
            shares_prefixes=self.shares_prefixes,
        )


def plan_steps(
    batch: SampleBatch,
    layout: ParallelLayout,
    *,
    tokens_per_micro_batch: int,
    mini_batches: int = 1,
    epochs: int = 1,
    aggregation: str,
    max_tokens: int,
    seed: int,
) -> list[StepPlan]:
    """The optimizer steps of one rollout batch, in order: `mini_batches` steps in each of `epochs`, or one per group if
    there are fewer groups, as after a postprocess that drops samples. `layout` is any rank's: it gives the number of
    dp ranks, the multiples for sequences and micro-batches, and whether micro-batches are rectangular.

    In every epoch each row belongs to exactly one step, and all rows of a group (`row_columns["group"]`) to the same
    step. The order in each epoch follows from `seed` alone; give each rollout step another seed.

    Weight of one loss token of row i, in a step of n samples, where i is one of the r rows of its sample:

        token-mean       1 / (loss tokens of the step)
        sequence-mean    1 / (n * r * loss tokens of i)      what has no loss token is not counted in n and r
        constant-length  1 / (n * max_tokens)                Liu et al. 2025, "Understanding R1-Zero-Like Training"
    """
    groups, group_of = np.unique(batch.row_columns["group"], return_inverse=True)
    loss_tokens = count_loss_tokens(batch)
    _, episode_of = batch.episodes
    steps = []
    for epoch in range(epochs):
        for chosen_groups in groups_of_steps(len(groups), mini_batches, seed, epoch):
            chosen = np.flatnonzero(np.isin(group_of, chosen_groups))
            own, count = _denominators(
                loss_tokens[chosen], episode_of[chosen], aggregation=aggregation, max_tokens=max_tokens
            )
            scales = np.zeros(len(batch), dtype=np.float32)
            scales[chosen] = _inverse(own * count)
            tokens = int(batch.lengths[chosen].sum())
            steps.append(_plan(batch, chosen, layout, scales, budget=tokens_per_micro_batch, step_tokens=tokens))
    return steps


def groups_of_steps(groups: int, mini_batches: int, seed: int, epoch: int = 0) -> list[IntArray]:
    """Which of a rollout batch's groups each step of an epoch trains on."""
    order = np.random.default_rng([seed, epoch]).permutation(groups)
    return np.array_split(order, min(mini_batches, groups))


def plan_part(
    batch: SampleBatch,
    layout: ParallelLayout,
    *,
    tokens_per_micro_batch: int,
    aggregation: str,
    max_tokens: int,
    unit: float = 1.0,
) -> tuple[StepPlan, float]:
    """One part of a step whose other parts are elsewhere, and what it adds to the step's denominator. All samples of an
    episode are in one part. Weights equal `plan_steps`' times the denominator, over `unit`: with the gradients of
    all parts, `TrainGroup.optimizer_step(step, scale=unit / denominator)` takes its step. A `unit` near the denominator
    keeps gradients of their usual size, which matters to formats of a small range.
    """
    loss_tokens = count_loss_tokens(batch)
    _, episode_of = batch.episodes
    own, count = _denominators(loss_tokens, episode_of, aggregation=aggregation, max_tokens=max_tokens)
    every = np.arange(len(batch))
    return _plan(batch, every, layout, _inverse(own * unit), budget=tokens_per_micro_batch), float(count)


def plan_forward(batch: SampleBatch, layout: ParallelLayout, *, tokens_per_micro_batch: int) -> StepPlan:
    """A plan that passes every sample once, without a loss: every scale is 0."""
    if not len(batch):
        raise DataError("the rollout batch has no samples to pass through the model")
    no_loss = np.zeros(len(batch), dtype=np.float32)
    return _plan(batch, np.arange(len(batch)), layout, no_loss, budget=tokens_per_micro_batch)


def _plan(
    batch: SampleBatch,
    chosen: IntArray,
    layout: ParallelLayout,
    scales: FloatArray,
    *,
    budget: int,
    step_tokens: int = 0,
) -> StepPlan:
    """A pass of the `chosen` samples."""
    sizes = -(-batch.lengths[chosen] // layout.sequence_multiple) * layout.sequence_multiple
    micro_batches, filler = _split(batch, chosen, sizes, layout, budget=budget)
    return StepPlan(
        micro_batches=micro_batches,
        filler=filler,
        scales=scales,
        step_tokens=step_tokens,
        shares_prefixes=layout.shares_prefixes,
    )


def count_loss_tokens(batch: SampleBatch) -> IntArray:
    """[B] number of loss tokens in each sample."""
    counts: IntArray = np.diff(np.searchsorted(np.flatnonzero(batch.columns["loss_mask"]), batch.offsets))
    return counts


def _inverse(denominators: Array) -> FloatArray:
    """[n] 1 / denominator, 0 for a denominator of 0."""
    found = np.zeros(len(denominators), dtype=np.float32)
    found[denominators > 0] = 1.0 / denominators[denominators > 0]
    return found


def _denominators(
    loss_tokens: IntArray, episode_of: IntArray, *, aggregation: str, max_tokens: int
) -> tuple[IntArray, int]:
    """The denominator of each sample as a product: what is its own [n], and what is counted over the step."""
    match aggregation:
        case "token-mean":
            return np.ones_like(loss_tokens), int(loss_tokens.sum())
        case "sequence-mean":
            samples = np.bincount(episode_of, weights=loss_tokens > 0).astype(np.int64)
            return samples[episode_of] * loss_tokens, int(np.count_nonzero(samples))
        case "constant-length":
            # All tokens of a step count the same, however many samples an episode has: that is the point of it.
            # Only rows without loss tokens have none: a step of such rows alone is to be skipped.
            return np.where(loss_tokens > 0, max_tokens, 0), len(np.unique(episode_of))
    raise ConfigError(
        f"algorithm.aggregation: unknown aggregation {aggregation!r}; use one of {', '.join(AGGREGATIONS)}"
    )


def _split(
    batch: SampleBatch, chosen: IntArray, sizes: IntArray, layout: ParallelLayout, *, budget: int
) -> tuple[tuple[tuple[IntArray, ...], ...], tuple[tuple[bool, ...], ...]]:
    """Split `chosen` samples of `sizes` tokens among dp ranks, pack each shard, and equalize counts with fillers."""
    bins = _similar_lengths if layout.rectangular else _first_fit_decreasing
    if layout.shares_prefixes and "group" in batch.row_columns and PICTURE not in batch.columns:
        trees, shards = _trees(batch, chosen, dp_size=layout.dp_size, budget=budget)
        packed = [
            [chosen[np.concatenate([trees.members[each] for each in shard[members]])] for members in bins(size, budget)]
            for shard, size in ((shard, trees.sizes[shard]) for shard in shards)
        ]
    else:
        shards = _balance(sizes, layout.dp_size)
        if PICTURE in batch.columns and "group" in batch.row_columns:
            shards = _by_group(sizes, batch.row_columns["group"][chosen], shards)
        packed = [[chosen[shard[members]] for members in bins(sizes[shard], budget)] for shard in shards]
    most = max(len(micro_batches) for micro_batches in packed)
    count = -(-most // layout.micro_batch_multiple) * layout.micro_batch_multiple
    cheapest = chosen[[int(np.argmin(sizes))]]  # a filler costs a pass of its tokens: take the shortest sample
    return (
        tuple(tuple(real + [cheapest] * (count - len(real))) for real in packed),
        tuple(tuple(m >= len(real) for m in range(count)) for real in packed),
    )


def _balance(sizes: IntArray, dp_size: int) -> list[IntArray]:
    """Members of each rank's shard: largest first, each to the rank with the fewest tokens so far (Graham 1969).

    The fullest rank has at most 4/3 of the optimum, and with many samples almost exactly the mean.
    """
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [(0, dp_rank) for dp_rank in range(dp_size)]
    largest_first = np.argsort(-sizes, kind="stable")
    for sample, size in zip(largest_first.tolist(), sizes[largest_first].tolist(), strict=True):
        load, dp_rank = loads[0]
        shards[dp_rank].append(sample)
        heapq.heapreplace(loads, (load + size, dp_rank))
    return [np.array(shard, dtype=np.int64) for shard in shards]


def _by_group(sizes: IntArray, group: IntArray, alone: list[IntArray]) -> list[IntArray]:
    """Members of each rank's shard of samples with pictures, which every rank that has a sample of their group encodes:
    groups stay whole, or are cut into as few equal parts as leave ranks nearly as evenly loaded as `alone`, the shards
    of single samples."""
    most = UNEVEN * max(int(sizes[shard].sum()) for shard in alone)
    _, group, counts = np.unique(group, return_inverse=True, return_counts=True)
    place = np.empty_like(group)  # of each sample in its group
    place[np.argsort(group, kind="stable")] = np.arange(len(group)) - np.repeat(offsets_of(counts)[:-1], counts)
    parts = 1
    while parts < counts.max():
        _, part = np.unique(group * parts + place * parts // counts[group], return_inverse=True)
        balanced = _balance(np.bincount(part, weights=sizes).astype(np.int64), len(alone))
        shards = [np.flatnonzero(np.isin(part, shard)) for shard in balanced]
        if max(int(sizes[shard].sum()) for shard in shards) <= most:
            return shards
        parts *= 2
    return alone


def _trees(batch: SampleBatch, chosen: IntArray, *, dp_size: int, budget: int) -> tuple[Trees, list[IntArray]]:
    """The `chosen` rows in trees of at most `budget` tokens, and members of each rank's shard of these. Where whole
    groups leave ranks unevenly loaded, they are cut into more trees, each of which computes what they share again."""
    order, lengths, prefixes = groups_in_order(batch, chosen)
    found: list[tuple[int, int, Trees, list[IntArray]]] = []
    rows = len(chosen)
    while rows:
        trees = in_trees(order, lengths, prefixes, tokens=budget, rows=rows)
        shards = _balance(trees.sizes, dp_size)
        fullest = max(int(trees.sizes[shard].sum()) for shard in shards)
        found.append((fullest, len(found), trees, shards))
        if fullest * dp_size <= UNEVEN * trees.sizes.sum():
            break
        rows = max(map(len, trees.members)) // 2
    return min(found)[2:]


def _similar_lengths(sizes: IntArray, budget: int) -> list[IntArray]:
    """Members of each bin, in which samples x the longest one are at most `budget`; a sample above it gets its own bin.

    Largest first, each bin takes as many as it may. No partition has fewer bins: exchanging members so that each bin
    holds neighbours in this order never makes a bin's longest longer, and of those partitions the greedy one is least.
    """
    order = np.argsort(-sizes, kind="stable")
    bins, first = [], 0
    while first < len(order):
        rows = max(budget // max(int(sizes[order[first]]), 1), 1)
        bins.append(order[first : first + rows])
        first += rows
    return bins


def _first_fit_decreasing(sizes: IntArray, budget: int) -> list[IntArray]:
    """Members of each bin: largest first, each into the first bin with room; a sample above `budget` gets its own bin.

    Samples of equal size are placed together: first-fit fills each bin with as many as it has room for, so one
    cumulative sum over the bins replaces a search per sample. The packing is the same, in O(distinct sizes) passes.
    """
    if not len(sizes):
        return []
    order = np.argsort(-sizes, kind="stable")
    room = np.zeros(len(sizes), dtype=np.int64)  # tokens left in each bin
    bin_of = np.empty(len(sizes), dtype=np.int64)  # the bin of each sample, in `order`
    bins = placed = 0
    distinct, counts = np.unique(np.maximum(sizes, 1), return_counts=True)  # an empty sample counts as one token
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        fits = room[:bins] // size
        before = np.cumsum(fits) - fits
        taken = np.minimum(np.maximum(count - before, 0), fits)
        room[:bins] -= taken * size
        left = count - int(taken.sum())
        each = max(budget // size, 1)
        opened = -(-left // each)
        new = np.full(opened, each)
        if opened:
            new[-1] = left - each * (opened - 1)
        room[bins : bins + opened] = np.maximum(budget - new * size, 0)
        bin_of[placed : placed + count] = np.repeat(np.arange(bins + opened), np.concatenate([taken, new]))
        bins, placed = bins + opened, placed + count
    by_bin = np.lexsort((order, bin_of))
    edges = np.cumsum(np.bincount(bin_of, minlength=bins))[:-1]
    return np.split(order[by_bin], edges)


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def pack(
    batch: SampleBatch, shard: StepShard, *, sequence_multiple: int, columns: Sequence[str] | None = None
) -> PackedBatch:
    """One dp rank's shard of a step. Micro-batches are built when iterated over, which can be repeated. `batch` are the
    rows that the shard's `given_rows` count.

    Every micro-batch carries `weights` [T], scales[row] * loss_mask, and `columns` of the batch; None takes all.
    `picture` is always among them, if rows show pictures.
    Padding to `sequence_multiple` has token 0 and zeros in every column. A filler has its sample's tokens, with
    weights 0, loss_mask False and row -1.
    """
    names = tuple(batch.columns) if columns is None else tuple(columns)
    if PICTURE in batch.columns and PICTURE not in names:
        names = (*names, PICTURE)
    unknown = [name for name in names if name not in batch.columns]
    if unknown:
        raise ValueError(f"the rollout batch has no column {unknown[0]!r}; it has: {', '.join(sorted(batch.columns))}")
    micro_batches = LazyMicroBatches(
        batch=batch,
        shard=shard,
        sequence_multiple=sequence_multiple,
        columns=names,
    )
    return PackedBatch(
        micro_batches=micro_batches,
        count=len(micro_batches),
        temperature=batch.temperature,
        step_tokens=shard.step_tokens,
        pictures=_shown(batch, shard.given_rows),
    )


def _shown(batch: SampleBatch, rows: IntArray) -> dict[int, Picture]:
    """The pictures of these rows, by their numbers in the column `picture`."""
    if PICTURE not in batch.columns:
        return {}
    column = batch.columns[PICTURE]
    spans = [column[batch.offsets[row] : batch.offsets[row + 1]] for row in np.unique(rows)]
    numbers = np.unique(np.concatenate([np.zeros(0, np.int32), *spans]))
    return {int(number): batch.pictures[number - 1] for number in numbers if number}


@frozen(kw_only=True, eq=False)
class LazyMicroBatches:
    """Builds each micro-batch when a loop reaches it; it can be looped over again."""

    batch: SampleBatch
    shard: StepShard
    sequence_multiple: int
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shard.filler)

    def __iter__(self) -> Iterator[MicroBatch]:
        spans = (slice(begin, end) for begin, end in pairwise(self.shard.offsets.tolist()))
        return map(self._build, spans, self.shard.filler.tolist())

    def _build(self, chosen: slice, filler: bool) -> MicroBatch:
        rows = self.shard.given_rows[chosen]
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
        columns["weights"] = np.repeat(self.shard.scales[chosen], padded) * mask
        prefixes = None
        if self.shard.shares_prefixes and PICTURE not in columns:
            prefixes = prefix_lengths(self.batch, rows, columns=self.columns)
            prefixes *= prefixes.sum() >= WORTH * lengths.sum()
        return MicroBatch(
            tokens=place(self.batch.tokens),
            positions=np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], padded),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            rows=np.full_like(rows, -1) if filler else self.shard.rows[chosen],
            columns=columns,
            prefix_lengths=prefixes,
        )
