"""A reference of FlashAttention over packed tokens, for CPUs: `corerl.ops.attention.KERNEL` and its backward pass, from
all scores of each pair of tokens."""

from __future__ import annotations

from typing import Any

import torch


def scored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,uhd->htu", q, k) * scale
    return torch.einsum("htu,uhd->thd", scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1), v)


def seen_by_the_kernel(q: torch.Tensor, k: torch.Tensor, *bounds: torch.Tensor, window_size_left: int) -> torch.Tensor:
    """As of FlashAttention: the last query of a sequence sees its last key, and each one before it a key less."""
    to_end, sequence = [], []
    for ends, tokens in zip(bounds, (len(q), len(k)), strict=True):
        sequence.append(torch.searchsorted(ends.long(), torch.arange(tokens), right=True))
        to_end.append(ends[sequence[-1]] - torch.arange(tokens))
    back = to_end[1] - to_end[0][:, None]
    seen = (sequence[0][:, None] == sequence[1]) & (back >= 0)
    return seen & (back <= window_size_left) if window_size_left >= 0 else seen


def as_the_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, key_ends: torch.Tensor, *_: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    seen = seen_by_the_kernel(q, k, ends, key_ends, window_size_left=named["window_size_left"])
    out = scored(q, k, v, seen, named["scale"])
    return torch.empty_like(q).copy_(out), torch.zeros(q.shape[1], len(q))


def back_from_the_kernel(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any, __: Any, *bounds: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    seen = seen_by_the_kernel(q, k, *bounds[:2], window_size_left=named["window_size_left"])
    every_k, every_v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    p = (torch.einsum("thd,uhd->htu", q, every_k) * named["scale"]).masked_fill(~seen, -torch.inf).softmax(-1)
    dp = torch.einsum("thd,uhd->htu", grad, every_v)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * named["scale"]
    dq = torch.einsum("htu,uhd->thd", ds, every_k)
    dk, dv = (
        torch.einsum("htu,thd->uhd", of, x).unflatten(1, (k.shape[1], -1)).sum(2) for of, x in ((ds, q), (p, grad))
    )
    return tuple(torch.empty_like(of).copy_(x) for of, x in ((q, dq), (k, dk), (v, dv)))
