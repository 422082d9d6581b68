"""`add_product_` in Triton: each weight is read and written once."""

# A kernel's arguments are Triton's own pointers and scalars.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 128  # of the weight, that one program takes
LEAST = 16  # the shortest sum that Triton makes a product of
MOST = 64  # terms of a sum that are in registers at a time


def add_product_(weight: Tensor, b: Tensor, a: Tensor, *, scale: float) -> None:
    rows, columns = weight.shape
    rank = a.shape[0]
    with torch.cuda.device_of(weight):
        _add_product[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
            weight,
            b,
            a,
            rows,
            columns,
            rank,
            float(scale),  # an int would compile another kernel
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            TERMS=min(MOST, max(LEAST, triton.next_power_of_2(rank))),
        )


@triton.jit
def _add_product(
    weight,
    b,
    a,
    rows,
    columns,
    rank,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    terms = tl.arange(0, TERMS)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rank, TERMS):
        k = first + terms
        of_b = tl.load(b + i * rank + k[None, :], mask=(i < rows) & (k[None, :] < rank), other=0.0)
        of_a = tl.load(a + k[:, None] * columns + j, mask=(k[:, None] < rank) & (j < columns), other=0.0)
        # Not by matrix units: for small ranks they are no faster, since memory is what this waits for (on an H100, rank
        # 32: 1.6 times a pass that multiplies by one; with three of their products for one of float32, 2.9 times).
        product = tl.dot(of_b, of_a, product, input_precision="ieee")
    place = weight + i.to(tl.int64) * columns + j
    inside = (i < rows) & (j < columns)
    sums = tl.load(place, mask=inside, other=0.0).to(tl.float32) + scale * product
    tl.store(place, sums.to(weight.dtype.element_ty), mask=inside)
