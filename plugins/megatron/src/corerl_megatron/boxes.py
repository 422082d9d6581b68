"""Tell from a function of Hugging Face tensors which box of which tensor each part of its result is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from corerl.errors import ModelError
from corerl.types import IntArray
from corerl_megatron.chunks import Piece

# Elements are numbered from 1, so that a 0 is padding. A second pass counts down from here: the sum of both numbers of
# an element then shows whether the function only moved it. Sums are exact in float64.
END = 2.0**45
MOST = 4096  # boxes of one parameter: of rows in turns there are as many as rows, which no weight update should send


@frozen(kw_only=True)
class Traced:
    pieces: Sequence[Piece]
    less: bool  # whether the function subtracts 1 from each value


class Numbered(Mapping[str, Tensor]):
    """Tensors whose elements are numbers, consecutive over the tensors in the order in which they are first read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes = shapes
        self.device = device
        self.first: dict[str, int] = {}  # number of the first element of each tensor that was read
        self.down = False
        self.count = 0  # of elements of those tensors

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        count = math.prod(shape)
        if name not in self.first:
            self.first[name], self.count = self.count + 1, self.count + count
        first = self.first[name]
        numbers = torch.arange(first, first + count, dtype=torch.float64, device=self.device).view(shape)
        return END - numbers if self.down else numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def trace(
    function: Callable[[Mapping[str, Tensor]], Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...],
    *,
    device: torch.device,
) -> Traced:
    """The boxes of tensors of these `shapes` that make up the function's result, a tensor [*shape]; what is 0 in it
    whatever the tensors contain is padding. Raises ModelError, with the reason, if it computes anything else from them.

    The function is called twice, with float64 tensors.
    """
    tensors = Numbered(shapes, device)
    up = function(tensors)
    tensors.down = True
    down = function(tensors)
    if tuple(up.shape) != shape:
        raise ModelError(f"it returns a tensor of shape {list(up.shape)}, wanted {list(shape)}")
    if up.dtype != torch.float64 or down.dtype != torch.float64:
        raise ModelError(f"it returns values of type {up.dtype}, wanted those that it got, {torch.float64}")
    padding = (up == 0) & (down == 0)
    both = torch.where(padding, END, up + down)
    twice = float(both.flatten()[0]) - END if both.numel() else 0.0
    if bool((both != END + twice).logical_and(~padding).any()) or twice not in (-2, 0):
        raise ModelError("it computes new values")
    less = twice == -2
    numbers = torch.where(padding, 0, up + less).long()
    used = torch.zeros(tensors.count + 1, dtype=torch.bool, device=numbers.device)
    used[numbers] = True
    if int(used[1:].sum()) != int((~padding).sum()):
        raise ModelError("it repeats values")
    return Traced(pieces=_pieces(numbers, tensors), less=less)


def _pieces(numbers: Tensor, tensors: Numbered) -> list[Piece]:
    """Boxes of what the elements of `numbers` [...] are; 0 is padding. Edges are looked for along the first line of
    each dim, and all elements are compared with what follows from them."""
    walks = [list(_runs(_line(numbers, dim), tensors)) for dim in range(numbers.dim())]
    if math.prod(len(runs) for runs in walks) > MOST:
        raise ModelError(f"it cuts a parameter into more than {MOST} boxes")
    found = []
    for cell in itertools.product(*walks):
        part = numbers[tuple(slice(at, at + size) for at, size in cell)]
        if part.any():
            found.append(_piece(part, tuple(at for at, _ in cell), tensors))
    return found


def _line(numbers: Tensor, dim: int) -> IntArray:
    line: IntArray = numbers[tuple(slice(None) if each == dim else 0 for each in range(numbers.dim()))].cpu().numpy()
    return line


def _runs(line: IntArray, tensors: Numbered) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of numbers [n] that goes along one dim of one tensor, or is padding."""
    steps = _steps(line, tensors)
    changes = np.flatnonzero(np.diff(steps)) + 1
    start = 0
    for low, high in itertools.pairwise([0, *changes.tolist(), len(steps)]):
        if low == high:
            continue
        # Step k leads from number k to the next one.
        for cut in range(low, high) if steps[low] == NOWHERE else range(low, low + (start < low)):
            yield start, cut + 1 - start
            start = cut + 1
    yield start, len(line) - start


NOWHERE, PADDING = -2, -1


def _steps(line: IntArray, tensors: Numbered) -> IntArray:
    """[n - 1] the dim along which each next number is the neighbor; PADDING within padding, or NOWHERE."""
    steps = np.full(len(line) - 1, NOWHERE)
    steps[(line[:-1] == 0) & (line[1:] == 0)] = PADDING
    for name, first in tensors.first.items():
        shape = tensors.shapes[name]
        inside = (line >= first) & (line < first + math.prod(shape))
        both = np.flatnonzero(inside[:-1] & inside[1:])
        if not len(both):
            continue
        at = np.stack(np.unravel_index(line[both] - first, shape))
        moved = np.stack(np.unravel_index(line[both + 1] - first, shape)) - at
        neighbors = (np.abs(moved).sum(0) == 1) & (moved.sum(0) == 1)
        steps[both[neighbors]] = moved.argmax(0)[neighbors]
    return steps


def _piece(part: Tensor, start: tuple[int, ...], tensors: Numbered) -> Piece:
    """What `part` of the numbers is: one box, or ModelError is raised."""
    number = int(part.flatten()[0])
    name = max((name for name, first in tensors.first.items() if first <= number), key=tensors.first.__getitem__)
    shape, first = tensors.shapes[name], tensors.first[name]
    offsets = tuple(int(i) for i in np.unravel_index(number - first, shape))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    free = dict(enumerate(strides))
    along: dict[int, int] = {}  # the tensor's dim for each of the parameter's
    for dim, size in sorted(enumerate(part.shape), key=lambda each: each[1], reverse=True):
        step = int(part.narrow(dim, 1, 1).flatten()[0]) - number if size > 1 else None
        fits = [axis for axis in free if step in (None, free[axis]) and offsets[axis] + size <= shape[axis]]
        if not fits:
            raise ModelError("it is not made of boxes")
        along[dim] = fits[0]
        del free[fits[0]]
    wanted = torch.full((), number, device=part.device)
    for dim, size in enumerate(part.shape):
        steps = torch.arange(size, device=part.device) * strides[along[dim]]
        wanted = wanted + steps.view([-1 if each == dim else 1 for each in range(part.dim())])
    if not torch.equal(part, wanted.expand(part.shape)):
        raise ModelError("it is not made of boxes")
    axes: list[int | None] = [None] * len(shape)
    for dim, axis in along.items():
        axes[axis] = dim
    return Piece(name, shape, offsets, start, tuple(part.shape), tuple(axes))
