"""Low-rank adapters by name, and the weights that they change.

An adapter of the HF tensor `model.layers.0.mlp.up_proj.weight` [out, in] is two tensors, A [rank, in] named
`base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` and B [out, rank] named the same with `lora_B`: as PEFT does
it, but after the weight's name in the files, where that is not the module's (`corerl.models.peft_names`). A backend
that trains adapters holds boxes of them among its parameters, under these names, and masters and moments of nothing
else but a value head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from corerl.ops.buildable import why_unbuildable

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


@frozen(eq=False)
class Adapters:
    """The whole adapters of a model, float32, with what their products are multiplied by."""

    tensors: Mapping[str, torch.Tensor]
    scale: float

    @torch.no_grad()
    def merge(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Add scale B A to those of `weights`, HF tensors, that have adapters. The sum is made in float32 and rounded
        once: a small change to a bfloat16 weight is lost where it is less than half a step, but nothing accumulates."""
        for name, weight in weights.items():
            a, b = (self.tensors.get(each) for each in adapters_of(name))
            if a is not None and b is not None:
                add_product_(weight, b, a, scale=self.scale)


def add_product_(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *, scale: float) -> None:
    """Add scale b a, of float32 matrices [out, rank] and [rank, in], to a weight [out, in] of any dtype, in one pass
    over it. Product and sum are made in float32 at least, and the sum is rounded once.

    torch's own addmm rounds the product too where the weight is bfloat16 on a GPU (of 2.11 on an H100: one element in
    ten then is off by more than half a step), and a product in memory of its own takes twice the traffic."""
    if weight.is_cuda and weight.dtype == torch.bfloat16 and weight.is_contiguous() and not why_unbuildable():
        from corerl.ops import kernels

        kernels.add_product_(weight, b.contiguous(), a.contiguous(), scale=scale)
    else:
        weight.add_(torch.mm(b, a), alpha=scale)  # of two dtypes torch adds in the wider one
