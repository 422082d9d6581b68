"""Describe which boxes of which Hugging Face tensors a rank holds; loading, streaming and resharding build on it."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import frozen

from corerl.errors import ModelError

if TYPE_CHECKING:
    import torch

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes), one entry per dim


@frozen(eq=False)
class Chunk:
    """One box of one HF tensor and its local storage: writing to `view` writes the model (or its moments)."""

    name: str  # as in the HF checkpoint
    shape: tuple[int, ...]  # of the whole HF tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view: torch.Tensor  # of `sizes`, a view of local storage
    replica: bool = False  # True if another rank holds the same box, and sends and saves it

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes


class TensorSource(Protocol):
    """Named tensors readable box by box, such as an HF directory, random weights or a checkpoint."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole tensor's shape; None if the source lacks it."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read one box [*sizes], in the source's own dtype and on its device."""


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    sizes = tuple(min(x + m, y + n) - start for x, m, y, n, start in zip(a[0], a[1], b[0], b[1], starts, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """`box` as slices of a tensor that covers `outer`."""
    return tuple(
        slice(start - base, start - base + size) for start, size, base in zip(box[0], box[1], outer[0], strict=True)
    )


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the elements [start, stop) of a row-major tensor into at most 2 * ndim - 1 boxes, in order."""
    if stop <= start:
        return []
    if not shape:
        return [((), ())]
    inner, boxes = math.prod(shape[1:]), list[Box]()
    while start < stop:
        row, offset = divmod(start, inner)
        if not offset and (rows := (stop - start) // inner):
            boxes.append(((row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
            start += rows * inner
        else:  # a part of one row
            end = min(stop, (row + 1) * inner)
            parts = flat_range_boxes(shape[1:], offset, end - row * inner)
            boxes += [((row, *offsets), (1, *sizes)) for offsets, sizes in parts]
            start = end
    return boxes


def flat_range_views(shape: Sequence[int], start: int, values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut elements [start, start + n) of a row-major tensor into boxes; yields each with its view [*sizes] of `values`
    [n], which hold one number per element."""
    at = 0
    for box in flat_range_boxes(shape, start, start + values.numel()):
        count = math.prod(box[1])
        yield box, values[at : at + count].view(box[1])
        at += count


def without_numbers(name: str) -> str:
    """The same for a tensor in all layers and experts."""
    return re.sub(r"\d+", "", name)


def runs_of(alike: Iterable[tuple[Hashable, tuple[int, ...]]]) -> list[list[int]]:
    """The positions of (kind, starts) pairs, in lists of one kind whose starts all grow by equal steps: in order, each
    as long as possible."""
    runs: dict[Hashable, list[list[tuple[int, tuple[int, ...]]]]] = {}
    for position, (kind, starts) in enumerate(alike):
        own = runs.setdefault(kind, [])
        new = (position, starts)
        steps = _steps(own[-1][-1], new) if own else ()
        if own and min(steps) > 0 and (len(own[-1]) == 1 or steps == _steps(*own[-1][-2:])):
            own[-1].append(new)
        else:
            own.append([new])
    return [[position for position, _ in run] for own in runs.values() for run in own]


def _steps(before: tuple[int, tuple[int, ...]], after: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(new - old for old, new in zip(before[1], after[1], strict=True))


def fill(chunks: Iterable[Chunk], source: TensorSource, *, what: str) -> int:
    """Copy each chunk's box from `source` into its view; returns the bytes read.

    Raises ModelError if the source lacks a tensor, or has it in another shape, quantized, or with NaN or infinite
    values. `what` names the source in the error.
    """
    read = 0
    for chunk in chunks:
        shape = source.shape(chunk.name)
        if shape is None:
            raise ModelError(f"{what} has no tensor {chunk.name!r} of shape {list(chunk.shape)}, which the model needs")
        if tuple(shape) != tuple(chunk.shape):
            raise ModelError(
                f"{what} has {chunk.name!r} with shape {list(shape)}, but the model needs {list(chunk.shape)}; use "
                "weights of the same model"
            )
        values = source.read(chunk.name, chunk.offsets, chunk.sizes)
        if not values.is_floating_point() or values.element_size() < 2:
            raise ModelError(f"{what} has {chunk.name!r} quantized as {values.dtype}, wanted 16 or 32 bits")
        if not finite(values):
            raise ModelError(f"{what} has NaN or infinite values in {chunk.name!r}; use weights that have none")
        chunk.view.copy_(values)
        read += values.numel() * values.element_size()
    return read


def finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. Needs no memory of the tensor's size: `aminmax` is NaN if any value is."""
    return not tensor.numel() or all(math.isfinite(end) for end in tensor.aminmax())


def holes(shapes: Mapping[str, tuple[int, ...]], boxes: Iterable[tuple[str, Box]]) -> dict[str, int]:
    """Tensors not covered exactly once by their boxes -> number of missing elements or, negative, of elements covered
    twice or outside the tensor. Overlaps are found by intersection, so two errors cannot cancel."""
    by_name: dict[str, list[Box]] = {name: [] for name in shapes}
    for name, box in boxes:
        by_name[name].append(box)
    wrong = {}
    for name, shape in shapes.items():
        found = sorted(by_name[name])
        whole = ((0,) * len(shape), tuple(shape))
        excess = 0
        covered = 0
        for i, box in enumerate(found):
            inside = intersect(box, whole)
            numel, kept = math.prod(box[1]), math.prod(inside[1]) if inside else 0
            covered += kept
            excess += numel - kept
            for other in found[i + 1 :]:
                if shape and other[0][0] >= box[0][0] + box[1][0]:
                    break  # sorted by first offset: no later box can overlap this one
                if common := intersect(box, other):
                    excess += math.prod(common[1])
        if excess:
            wrong[name] = -excess
        elif covered != math.prod(shape):
            wrong[name] = math.prod(shape) - covered
    return wrong
