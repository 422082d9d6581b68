"""Low-rank adapters by name, and the weights that they change.

An adapter of the HF tensor `model.layers.0.mlp.up_proj.weight` [out, in] is two tensors, A [rank, in] named
`base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` and B [out, rank] named the same with `lora_B`: as PEFT does
it, but after the weight's name in the files, where that is not the module's (`corerl.models.peft_names`). A backend
that trains adapters holds boxes of them among its parameters, under these names, and masters and moments of nothing
else but a value head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from corerl.ops.buildable import why_unbuildable
from corerl.weights.chunks import runs_of, without_numbers

if TYPE_CHECKING:
    from corerl.weights.manifest import Bucket, Entry

MOST = 2**24  # elements of a product that has memory of its own, unless one matrix has more
_unbuildable = functools.cache(why_unbuildable)  # which looks through PATH
PREFIX = "base_model.model."
WEIGHT = ".weight"
A, B = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Whether a tensor of that name is an A or a B."""
    return name.startswith(PREFIX) and name.endswith((A, B))


def adapters_of(weight: str) -> tuple[str, str]:
    """The names of A and B of an HF tensor."""
    stem = PREFIX + weight.removesuffix(WEIGHT)
    return stem + A, stem + B


def adapted(adapter: str) -> str:
    """The HF tensor that an A or a B changes."""
    return adapter.removeprefix(PREFIX).removesuffix(A).removesuffix(B) + WEIGHT


@frozen
class Matrices:
    """`count` matrices [rows, columns] of a flat buffer, the first at element `start`, each `step` after the last."""

    shape: tuple[int, ...]
    start: int
    step: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Them as a view [count, rows, columns] of the buffer."""
        strides = (self.step, self.shape[1], 1)
        return flat.as_strided((self.count, *self.shape), strides, flat.storage_offset() + self.start)


@frozen
class Merge:
    """Weights of one bucket, to which scale B A is added at once."""

    weights: Matrices
    b: Matrices
    a: Matrices
    scale: float = field(kw_only=True)

    def add(self, weights: torch.Tensor, adapters: torch.Tensor) -> None:
        """Add it in `weights`, a bucket's flat buffer of any dtype; `adapters` is that of A and B, float32."""
        add_products_(self.weights.of(weights), self.b.of(adapters), self.a.of(adapters), scale=self.scale)


def plan_merges(weights: Bucket, adapters: Bucket, scale: float) -> list[Merge]:
    """How the adapters of a bucket's weights are added: at once to those of one shape at equal distances, such as the
    up projections of a layer's experts, since to launch a product for each would take longer than to compute it."""
    own = {entry.name: entry for entry in adapters.entries}
    named = ((entry, *adapters_of(entry.name)) for entry in weights.entries)
    found = [(weight, own[b], own[a]) for weight, a, b in named if a in own and b in own]
    runs = runs_of(
        ((without_numbers(three[0].name), *(each.shape for each in three)), tuple(each.start for each in three))
        for three in found
    )
    return [Merge(*_matrices([found[position] for position in run]), scale=scale) for run in runs]


def _matrices(run: Sequence[tuple[Entry, ...]]) -> Iterator[Matrices]:
    for each, second in zip(run[0], run[min(1, len(run) - 1)], strict=True):
        yield Matrices(each.shape, each.start, second.start - each.start or each.numel, len(run))


@torch.no_grad()
def add_products_(weights: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *, scale: float) -> None:
    """Add scale b a, of float32 matrices [n, out, rank] and [n, rank, in], to weights [n, out, in] of any dtype, in one
    pass over them. Product and sum are made in float32 at least, and the sum is rounded once: a small change to a
    bfloat16 weight is lost where it is less than half a step.

    torch's own addmm rounds the product too where the weight is bfloat16 on a GPU (of 2.11 on an H100: one element in
    ten then is off by more than half a step), and a product in memory of its own takes twice the traffic."""
    whole = all(each[0].is_contiguous() for each in (weights, b, a))
    if weights.is_cuda and weights.dtype == torch.bfloat16 and whole and not _unbuildable():
        from corerl.ops import kernels

        kernels.add_products_(weights, b, a, scale=scale)
        return
    at_once = max(1, MOST // weights[0].numel())
    for weight, left, right in zip(weights.split(at_once), b.split(at_once), a.split(at_once), strict=True):
        weight.add_(torch.bmm(left, right), alpha=scale)  # of two dtypes torch adds in the wider one
