"""Find rows that begin with the same tokens, and cut groups of them into trees that count tokens in common once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from attrs import frozen

from corerl.types import TARGETS, IntArray, Output, SampleBatch

# Attention reads copies of what rows share. With at most so many tokens of rows to one of a tree, the memory of a
# layer's copies and of their gradients is small against that of all layers' activations.
COPIES = 16
READ = (TARGETS, Output.ROUTED_EXPERTS.value)  # columns that the model reads besides the tokens


@frozen(kw_only=True, eq=False)
class Trees:
    """Rows in trees: in the order of each, a row begins with tokens of the one before it."""

    members: tuple[IntArray, ...]  # of each tree, as indices of the chosen rows
    sizes: IntArray  # [trees] tokens that go through the model, or a COPIES-th of those of the rows if that is more


def prefix_lengths(batch: SampleBatch, rows: IntArray, *, columns: tuple[str, ...] = READ) -> IntArray:
    """[n] how many first tokens each of `rows` [n] has in common with the one before it, and all that these `columns`
    say of them; 0 for the first row."""
    read = [batch.tokens, *(batch.columns[name] for name in columns if name in READ and name in batch.columns)]
    prefixes = np.zeros(len(rows), np.int64)
    for place, (before, row) in enumerate(pairwise(rows.tolist()), start=1):
        first, second = batch.offsets[before], batch.offsets[row]
        count = min(batch.offsets[before + 1] - first, batch.offsets[row + 1] - second)
        for values in read:
            differ = values[first : first + count] != values[second : second + count]
            at = np.flatnonzero(differ.any(axis=tuple(range(1, differ.ndim))))
            count = at[0] if len(at) else count
        prefixes[place] = count
    return prefixes


def groups_in_order(batch: SampleBatch, chosen: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The places [n] of the `chosen` rows in an order in which rows of a group follow each other, and each has as much
    in common with the one before it as with any earlier one; and in that order their lengths, and `prefix_lengths`,
    which are 0 for the first of a group."""
    group = batch.row_columns["group"][chosen]
    keys = [batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tobytes() for row in chosen]
    order = np.array(sorted(range(len(chosen)), key=lambda each: (group[each], keys[each])))
    same = np.diff(group[order], prepend=group[order[0]] - 1) == 0
    return order, batch.lengths[chosen][order], prefix_lengths(batch, chosen[order]) * same


def in_trees(order: IntArray, lengths: IntArray, prefixes: IntArray, *, tokens: int, rows: int) -> Trees:
    """Cut rows, as of `groups_in_order`, into trees of at most so many tokens and rows, or of one row that has more."""
    begins, sizes = list[int](), list[int]()
    copied = members = 0  # tokens of the tree's rows, and their number
    for place, (length, count) in enumerate(zip(lengths.tolist(), prefixes.tolist(), strict=True)):
        copied, members = copied + length, members + 1
        size = max(sizes[-1] + length - count, copied // COPIES) if count else 0
        if count and size <= tokens and members <= rows:
            sizes[-1] = size
        else:
            begins.append(place)
            sizes.append(length)
            copied, members = length, 1
    return Trees(members=tuple(np.split(order, begins[1:])), sizes=np.array(sizes))
