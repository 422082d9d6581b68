"""Lay out sequences of different lengths as a few padded rectangles, each at least three quarters full, or as one."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from corerl.types import IntArray

FILL = 0.75  # a sequence shorter than this fraction of a rectangle's length opens the next rectangle


@frozen(kw_only=True, eq=False)
class Rectangles:
    """Maps T packed tokens to the P cells of all rectangles, which are stored end to end, row by row."""

    shapes: tuple[tuple[int, int], ...]  # (sequences, length) of each rectangle
    gather: IntArray  # [P] the token in each cell; a padding cell repeats its sequence's last token
    scatter: IntArray  # [T] the cell of each token

    @property
    def in_place(self) -> bool:
        """Whether the packed tokens already are these rectangles: nothing moves, nothing is padded."""
        return len(self.gather) == len(self.scatter) and bool((self.gather[:-1] < self.gather[1:]).all())


def rectangles(cu_seqlens: IntArray, *, fill: float = FILL) -> Rectangles:
    """Group the sequences bounded by cu_seqlens [S + 1] by similar length; empty ones are left out. With a `fill` of 0
    all are in one rectangle, the longest sequence first."""
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    shapes: list[tuple[int, int]] = []
    gathered: list[IntArray] = []
    scatter = np.empty(int(lengths.sum()), dtype=np.int64)
    cells = first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        last = int(np.searchsorted(-lengths[order], -fill * longest, side="right"))
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
