"""Low-rank adapters by the names that PEFT gives them, and the weights that they change.

An adapter of the HF tensor `model.layers.0.mlp.up_proj.weight` [out, in] is two tensors, A [rank, in] named
`base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` and B [out, rank] named the same with `lora_B`. A backend
that trains adapters holds boxes of them among its parameters, under these names, and masters and moments of nothing
else but a value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

import torch
from attrs import frozen

Halves: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # of float32 values: their high bits, and the rest; bfloat16

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
            a, b = adapters_of(name)
            if a not in self.tensors or b not in self.tensors:
                continue
            if weight.is_cuda and weight.dtype == torch.bfloat16:
                add_product(weight, self.halves[b], self.halves[a], scale=self.scale)
            else:  # of two dtypes torch adds in the wider one
                weight.add_(torch.mm(self.tensors[b], self.tensors[a]), alpha=self.scale)

    @cached_property
    def halves(self) -> Mapping[str, Halves]:
        """Each of the tensors split in two. All at once, since one by one a thousand small kernels would take longer to
        launch than the products take."""
        flat = torch.cat([each.reshape(-1) for each in self.tensors.values()])
        sizes = [each.numel() for each in self.tensors.values()]
        high, rest = (half.split(sizes) for half in split(flat))
        return {
            name: (high[index].view(each.shape), rest[index].view(each.shape))
            for index, (name, each) in enumerate(self.tensors.items())
        }


def split(values: torch.Tensor) -> Halves:
    """What bfloat16 holds of float32 values, and what it holds of the rest: together 16 bits."""
    high = values.bfloat16()
    return high, (values - high).bfloat16()


def add_product(weight: torch.Tensor, b: Halves, a: Halves, *, scale: float) -> None:
    """Add scale b a, of split matrices [out, rank] and [rank, in], to a weight [out, in] of bfloat16 in one pass over
    it: matrix units multiply bfloat16, sum in float32, and round once.

    The product of both rests, 2^-16 of the whole at most, is left out: of the sum's last bit, 2^-8 of the weight, that
    is nothing but where the sum lies next to the middle between two values."""
    (b_high, b_rest), (a_high, a_rest) = b, a
    weight.addmm_(torch.cat([b_high, b_rest, b_high], 1), torch.cat([a_high, a_high, a_rest]), alpha=scale)
