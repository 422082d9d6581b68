"""Add the product of two small matrices to a large one, in one pass over it and rounded once."""

from __future__ import annotations

from torch import Tensor, bfloat16, mm

from corerl.ops.buildable import lacking


def add_product_(weight: Tensor, b: Tensor, a: Tensor, *, scale: float) -> None:
    """Add scale b a, of float32 matrices [out, rank] and [rank, in], to a weight [out, in] of any dtype. Product and
    sum are made in float32 at least, and the sum is rounded once.

    torch's own addmm rounds the product too where the weight is bfloat16 on a GPU (of 2.11 on an H100: one element in
    ten then is off by more than half a step), and a product in memory of its own takes twice the traffic."""
    if weight.is_cuda and weight.dtype == bfloat16 and weight.is_contiguous() and not lacking():
        from corerl.ops import product_kernels

        product_kernels.add_product_(weight, b.contiguous(), a.contiguous(), scale=scale)
    else:
        weight.add_(mm(b, a), alpha=scale)  # of two dtypes torch adds in the wider one
