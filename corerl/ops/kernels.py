"""Triton kernels: the passes of `softmax`, each of which reads the logits from memory once, and the merge of adapters,
which reads and writes each weight once."""

# A kernel's arguments are Triton's own pointers and scalars.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from corerl.ops.softmax import RowSums, Slopes

AT_ONCE = 4096  # logits of a row that one program holds in registers at a time
WARPS = 8
ROWS, COLUMNS = 64, 128  # of a weight, that one program takes
LEAST = 16  # the shortest sum that Triton makes a product of
MOST = 64  # terms of a sum that are in registers at a time


def row_sums(
    logits: Tensor, targets: Tensor, sums: RowSums, *, temperature: float, real: int, with_spread: bool
) -> None:
    """Write the row sums into `sums`."""
    with torch.cuda.device_of(logits):
        _row_sums[(len(logits),)](
            logits,
            targets.contiguous(),
            *sums,
            logits.stride(0),
            targets.shape[1],
            real,
            float(temperature),  # an int would compile another kernel
            SPREAD=with_spread,
            TARGETS=triton.next_power_of_2(targets.shape[1]),
            COLUMNS=AT_ONCE,
            num_warps=WARPS,
        )


def gradient_(
    logits: Tensor, targets: Tensor, normalizer: Tensor, slopes: Slopes, *, temperature: float, real: int
) -> None:
    """Write the gradient over `logits`."""
    tokens, columns = logits.shape
    with torch.cuda.device_of(logits):
        _gradient[(tokens, triton.cdiv(columns, AT_ONCE))](
            logits,
            targets.contiguous(),
            normalizer,
            slopes.falls,
            slopes.rises.contiguous(),
            slopes.slope if slopes.slope is not None else slopes.falls,  # not read
            logits.stride(0),
            targets.shape[1],
            columns,
            real,
            float(temperature),  # an int would compile another kernel
            ENTROPY=slopes.slope is not None,
            COLUMNS=AT_ONCE,
            num_warps=WARPS,
        )


@triton.jit
def _row_sums(
    logits,
    targets,
    chosen,
    peak,
    total,
    spread,
    stride,
    several,
    real,
    temperature,
    SPREAD: tl.constexpr,
    TARGETS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    m = -1e30
    a = 0.0
    b = 0.0
    for first in range(0, real, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < real
        x = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
        x = tl.div_rn(tl.where(x < -1e30, -1e30, x), temperature)
        x = tl.where(inside, x, -1e30)
        highest = tl.maximum(m, tl.max(x, 0))
        # Rescale the sums from the old peak to the new one.
        shift = m - highest
        scale = tl.exp(shift)
        below = x - highest
        powers = tl.exp(below)
        if SPREAD:
            b = scale * (b + shift * a) + tl.sum(powers * below, 0)
        a = scale * a + tl.sum(powers, 0)
        m = highest
    each = tl.arange(0, TARGETS)
    there = each < several
    y = tl.load(targets + row * several + each, mask=there, other=-1)
    x_y = tl.load(logits + y, mask=(y >= 0) & (y < real), other=float("nan")).to(tl.float32)  # no valid target
    tl.store(chosen + row * several + each, tl.div_rn(x_y, temperature), mask=there)
    tl.store(peak + row, m)
    tl.store(total + row, a)
    if SPREAD:
        tl.store(spread + row, b)


@triton.jit
def _gradient(
    logits,
    targets,
    normalizer,
    falls,
    rises,
    slope,
    stride,
    several,
    width,
    real,
    temperature,
    ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    x = tl.load(logits + columns, mask=columns < real, other=0.0).to(tl.float32)
    log_p = tl.div_rn(tl.where(x < -1e30, -1e30, x), temperature) - tl.load(normalizer + row)
    factor = tl.load(falls + row)
    if ENTROPY:
        factor += tl.load(slope + row) * log_p
    d = tl.exp(log_p) * factor
    for each in range(row * several, (row + 1) * several):
        y = tl.load(targets + each)
        if (y >= first) & (y < first + COLUMNS):  # or many targets would take longer than the logits
            d = tl.where(columns == y, d + tl.load(rises + each), d)
    d = tl.where(columns < real, d, 0.0)
    tl.store(logits + columns, d.to(logits.dtype.element_ty), mask=columns < width)


def add_products_(weights: Tensor, b: Tensor, a: Tensor, *, scale: float) -> None:
    count, rows, columns = weights.shape
    rank = a.shape[1]
    with torch.cuda.device_of(weights):
        _add_products[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), count)](
            weights,
            b,
            a,
            weights.stride(0),
            b.stride(0),
            a.stride(0),
            rows,
            columns,
            rank,
            float(scale),  # an int would compile another kernel
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            TERMS=min(MOST, max(LEAST, triton.next_power_of_2(rank))),
        )


@triton.jit
def _add_products(
    weight,
    b,
    a,
    weight_step,
    b_step,
    a_step,
    rows,
    columns,
    rank,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    number = tl.program_id(2).to(tl.int64)
    weight += number * weight_step
    b += number * b_step
    a += number * a_step
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
