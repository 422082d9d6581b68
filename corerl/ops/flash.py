"""torch's FlashAttention kernel over packed sequences, as an operator that `torch.compile` accepts.

`torch.nn.attention.varlen` has one too. That of torch 2.11 wants as many heads of keys as of queries, and each takes
the longest sequence as a number, which a compiled layer would be recompiled for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FULL = -1  # the `window` of a token that sees all before it
NAME = "corerl::packed_attention"


@torch.library.custom_op(
    NAME,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor longest, float scale, int window)"
    " -> (Tensor, Tensor)",
)
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [T, H, D], k and v [T, Hkv, D] in half precision on CUDA, within the sequences that
    `cu_seqlens` [S + 1] bounds, of which the longest has `longest` [] tokens, on the host; a token sees `window`
    tokens, itself among them, or with FULL all. Returns [T, H, D] and the log-sum-exp [H, T] of its scores."""
    at_most, left = int(longest), window - 1 if 0 < window < int(longest) else FULL
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, at_most, at_most, 0.0, left == FULL, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op(
    f"{NAME}_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, Tensor longest,"
    " float scale, int window) -> (Tensor, Tensor, Tensor)",
)
def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    at_most, left = int(longest), window - 1 if 0 < window < int(longest) else FULL
    # Of dropout, which there is none of.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, at_most, at_most, 0.0, left == FULL, state, unused,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return dq, dk, dv


@flash_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@flash_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, longest, scale, window = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, longest)
    ctx.scale, ctx.window = scale, window


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *flash_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None, None


flash_attention.register_autograd(_gradients, setup_context=_keep)
