"""Find rows that begin with the same tokens, and cut groups of them into trees whose tokens in common are counted once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from attrs import frozen

from corerl.types import TARGETS, IntArray, Output, SampleBatch

READ = (TARGETS, Output.ROUTED_EXPERTS.value)  # columns that the model reads besides the tokens


@frozen(kw_only=True, eq=False)
class Trees:
    """Rows in trees: in the order of each, a row begins with tokens of the one before it."""

    members: tuple[IntArray, ...]  # of each tree, as indices of the chosen rows
    sizes: IntArray  # [trees] tokens that go through the model


def shared_tokens(batch: SampleBatch, rows: IntArray, *, columns: tuple[str, ...] = READ) -> IntArray:
    """[n] how many first tokens each of `rows` [n] has in common with the one before it, and all that these `columns`
    say of them; 0 for the first row."""
    read = [batch.tokens, *(batch.columns[name] for name in columns if name in READ and name in batch.columns)]
    shared = np.zeros(len(rows), np.int64)
    for place, (before, row) in enumerate(pairwise(rows.tolist()), start=1):
        first, second = batch.offsets[before], batch.offsets[row]
        count = min(batch.offsets[before + 1] - first, batch.offsets[row + 1] - second)
        for values in read:
            differ = values[first : first + count] != values[second : second + count]
            at = np.flatnonzero(differ.any(axis=tuple(range(1, differ.ndim))))
            count = at[0] if len(at) else count
        shared[place] = count
    return shared


def in_trees(batch: SampleBatch, chosen: IntArray, *, budget: int, dp_size: int) -> Trees:
    """The `chosen` rows of a batch in trees of at most `budget` tokens, unless one row alone has more. Rows of a tree
    are of one group. Where ranks would get unequal shares of whole groups, these are cut into more trees, of which each
    computes the prefix again."""
    group = batch.row_columns["group"][chosen]
    keys = [batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tobytes() for row in chosen]
    # In this order no other row has more in common with a row than the one before it.
    order = np.array(sorted(range(len(chosen)), key=lambda each: (group[each], keys[each])))
    lengths = batch.lengths[chosen][order]
    shared = shared_tokens(batch, chosen[order]) * (np.diff(group[order], prepend=group[order[0]]) == 0)
    cuts = []
    while not cuts or (dp_size > 1 and budget >= lengths.max()):
        trees = _cut(order, lengths, shared, budget)
        fullest = max(-(-int(trees.sizes.sum()) // dp_size), int(trees.sizes.max()))  # a bound that is nearly reached
        cuts.append((fullest, len(cuts), trees))
        budget //= 2
    return min(cuts)[2]


def _cut(order: IntArray, lengths: IntArray, shared: IntArray, most: int) -> Trees:
    """Trees of at most `most` tokens, of rows in this order."""
    begins, sizes = [], [0]
    for place, (length, count) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        if not begins or not count or sizes[-1] + length - count > most:
            begins.append(place)
            sizes.append(length)
        else:
            sizes[-1] += length - count
    return Trees(members=tuple(np.split(order, begins[1:])), sizes=np.array(sizes[1:]))
