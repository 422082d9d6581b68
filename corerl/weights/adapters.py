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

from corerl.ops.products import add_product_

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
