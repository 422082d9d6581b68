"""Lay sequences of different lengths out as a few padded rectangles, each at least three quarters full."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from corerl.types import IntArray

FILL = 0.75  # a sequence shorter than this share of a rectangle's longest opens the next rectangle


@frozen(kw_only=True, eq=False)
class Rectangles:
    """Where T packed tokens lie in rectangles of P cells in all, stored end to end and row by row."""

    shapes: tuple[tuple[int, int], ...]  # (sequences, length) of each rectangle
    gather: IntArray  # [P] the token in each cell; a cell of padding repeats its sequence's last token
    scatter: IntArray  # [T] the cell of each token

    @property
    def in_place(self) -> bool:
        """The packed tokens already are these rectangles: nothing moves, nothing is padded."""
        return len(self.gather) == len(self.scatter) and bool((self.gather[:-1] < self.gather[1:]).all())


def rectangles(cu_seqlens: IntArray) -> Rectangles:
    """Group the sequences that cu_seqlens [S + 1] bounds by similar length; empty ones are left out."""
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    shapes: list[tuple[int, int]] = []
    gathered: list[IntArray] = []
    scatter = np.empty(int(lengths.sum()), dtype=np.int64)
    cells = first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        last = int(np.searchsorted(-lengths[order], -FILL * longest, side="right"))
        rows = order[first:last]
        columns = np.arange(longest)
        tokens = starts[rows, None] + np.minimum(columns, lengths[rows, None] - 1)
        filled = columns < lengths[rows, None]
        scatter[tokens[filled]] = cells + np.flatnonzero(filled)
        shapes.append((len(rows), longest))
        gathered.append(tokens.ravel())
        cells += tokens.size
        first = last
    gather = np.concatenate(gathered) if gathered else np.empty(0, dtype=np.int64)
    return Rectangles(shapes=tuple(shapes), gather=gather, scatter=scatter)
