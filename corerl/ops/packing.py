"""The layout of sequences packed into one row of tokens, and of the padded rectangles for code that cannot pack; and
the copy of host arrays to a device."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from corerl.types import Array, IntArray, offsets_of

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


@frozen(eq=False)
class PackedSequences:
    """The layout of S sequences in T packed tokens; made once per micro-batch and used by every layer. With `prefixes`
    it is that of the N tokens that go through a model: of each sequence those that it shares with none before it."""

    tokens: int  # T, or N
    longest: int  # tokens of the longest sequence, with its prefix
    longest_on_host: Tensor  # the same, [] int64: a layer would be recompiled for each number
    cu_seqlens: Tensor  # [S + 1] int32 on the device: sequence s is tokens[cu_seqlens[s]:cu_seqlens[s + 1]]
    bounds: IntArray  # the same on the host
    continuations: Tensor  # [T - S] int64 on the device: indices of all but the first token of each sequence
    prefixes: SharedPrefixes | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor | IntArray, device: torch.device | str) -> PackedSequences:
        """Make it from [S + 1] bounds, such as `MicroBatch.cu_seqlens`.

        Raises ValueError unless they begin with 0 and never decrease.
        """
        host = cu_seqlens.cpu().numpy() if isinstance(cu_seqlens, Tensor) else np.asarray(cu_seqlens)
        bounds = host.astype(np.int64)
        if bounds.ndim != 1 or len(bounds) == 0 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seqlens must begin with 0 and never decrease, got {bounds.tolist()}")
        lengths = np.diff(bounds)
        continues = np.ones(int(bounds[-1]), dtype=np.bool_)
        continues[bounds[:-1][lengths > 0]] = False
        longest = int(lengths.max(initial=0))
        return cls(
            tokens=int(bounds[-1]),
            longest=longest,
            longest_on_host=torch.tensor(longest, device="cpu"),
            cu_seqlens=upload(bounds.astype(np.int32), device),
            bounds=bounds,
            continuations=upload(np.flatnonzero(continues), device),
        )

    def with_prefixes(self, prefix_lengths: IntArray) -> PackedSequences:
        """The layout in which the first `prefix_lengths` [S] tokens of each sequence, which are those of the one before
        it, go through the model once."""
        device, lengths = self.cu_seqlens.device, np.diff(self.bounds)
        kept = offsets_of(lengths - prefix_lengths)
        place = np.empty(self.tokens, np.int64)
        before = 0
        for start, count, first, end in zip(self.bounds[:-1], prefix_lengths, kept[:-1], kept[1:], strict=True):
            place[start : start + count] = place[before : before + count]
            place[start + count : start + count + end - first] = np.arange(first, end)
            before = start
        token = np.delete(np.arange(self.tokens), _within(self.bounds[:-1], prefix_lengths))
        continues = np.ones(len(token), dtype=np.bool_)
        continues[kept[:-1][(prefix_lengths == 0) & (lengths > 0)]] = False
        copies = np.argsort(place, kind="stable")
        return evolve(
            self,
            tokens=len(token),
            cu_seqlens=upload(kept.astype(np.int32), device),
            bounds=kept,
            continuations=upload(np.flatnonzero(continues), device),
            prefixes=SharedPrefixes(
                sequences=self,
                token=upload(token, device),
                place=upload(place, device),
                previous=upload(place[token[continues] - 1], device),
                copies=upload(copies, device),
                first_copy=upload(np.searchsorted(place[copies], np.arange(len(token))), device),
            ),
        )

    @property
    def previous(self) -> Tensor:
        """[T - S] the place of the token before each of `continuations`."""
        return self.continuations - 1 if self.prefixes is None else self.prefixes.previous

    @cached_property
    def padded(self) -> tuple[Rectangles, Tensor | None, Tensor | None]:
        """Rectangles for kernels that cannot pack; gather and scatter on the device, None if no token moves."""
        layout = rectangles(self.bounds)
        return (layout, None, None) if layout.in_place else self._on_device(layout)

    @cached_property
    def rows(self) -> tuple[Rectangles, Tensor, Tensor]:
        """One rectangle, of which each row is a sequence; gather and scatter on the device."""
        return self._on_device(rectangles(self.bounds, fill=0.0))

    def _on_device(self, layout: Rectangles) -> tuple[Rectangles, Tensor, Tensor]:
        device = self.cu_seqlens.device
        return layout, upload(layout.gather, device), upload(layout.scatter, device)


@frozen(kw_only=True, eq=False)
class SharedPrefixes:
    """How the T tokens of sequences are made of the N that go through a model; tensors are int64 on the device."""

    sequences: PackedSequences  # of the T tokens
    token: Tensor  # [N] the first of the sequences' tokens that each is
    place: Tensor  # [T] which of the N each of the sequences' tokens is
    previous: Tensor  # [n] which one comes before each of the n that begin no sequence
    copies: Tensor  # [T] the sequences' tokens, sorted by place
    first_copy: Tensor  # [N] where those of each of the N begin in that


def _within(starts: IntArray, counts: IntArray) -> IntArray:
    """The indices from starts[s] to starts[s] + counts[s], of all s."""
    ends = offsets_of(counts)
    return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], counts)


def upload(array: Array, device: torch.device | str) -> Tensor:
    """Copy to `device` without waiting; work on the current stream sees the finished copy.

    A copy from pageable memory would block the host until the device finishes its queue, and the device would then
    idle while the host prepares more. The array may be read-only, and may change afterwards.
    """
    pinned = torch.device(device).type == "cuda"
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=dtype, device="cpu", pin_memory=pinned)
    np.copyto(host.numpy(), array)
    return host.to(device, non_blocking=pinned)
