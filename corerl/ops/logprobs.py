"""Log-probs and entropy of target tokens from hidden states, without ever holding the logits of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 2**24  # of one chunk: 64 MiB in float32


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] of `targets` [T] under softmax((hidden weight^T + bias) / temperature), and its entropy [T].

    hidden [T, H], weight [V, H], bias [V]. Both results are float32 (float64 for float64 input); entropy is None unless
    asked for. Logits exist for `chunk_tokens` tokens at a time, by default as many as make 2**24 logits; the backward
    pass makes them again instead of keeping them.

    With z the tempered logits, p = softmax(z), y the target and H = -sum_j p_j log p_j:

        d log p_y / d z_j = [j = y] - p_j
        d H       / d z_j = -p_j (log p_j + H)

    the second because dp_i/dz_j = p_i ([i = j] - p_j) and sum_i dp_i/dz_j = 0. The gradient of `weight` is summed over
    chunks in float32.
    """
    chunk = chunk_tokens if chunk_tokens is not None else max(1, LOGITS // weight.shape[0])
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, with_entropy, chunk)
    return logprobs, entropy if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        normalizer = torch.empty_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        for part in _chunks(len(hidden), chunk):
            z = _logits(hidden[part], weight, bias, temperature, exact)
            norm = z.logsumexp(-1)
            chosen = z.gather(-1, targets[part, None]).squeeze(-1)
            normalizer[part] = norm
            logprobs[part] = chosen - norm
            if with_entropy:
                log_p = z.sub_(norm[:, None])
                entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.with_entropy, ctx.chunk = temperature, with_entropy, chunk
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        exact = normalizer.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if need_bias else None
        for part in _chunks(len(hidden), ctx.chunk):
            log_p = _logits(hidden[part], weight, bias, ctx.temperature, exact).sub_(normalizer[part, None])
            d_z = log_p.exp()  # p, and from here on the gradient
            if ctx.with_entropy:
                # -p (g + e (log p + H)), both gradients in one pass
                log_p.add_(entropy[part, None]).mul_(d_entropy[part, None]).add_(d_logprobs[part, None])
                d_z.mul_(log_p)
            else:
                d_z.mul_(d_logprobs[part, None])
            del log_p
            d_z.neg_().scatter_add_(-1, targets[part, None], d_logprobs[part, None]).div_(ctx.temperature)
            if d_bias is not None:
                d_bias += d_z.sum(0)
            d_z = d_z.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_z, weight, out=d_hidden[part])
            if d_weight is not None and d_weight.dtype == d_z.dtype:
                d_weight.addmm_(d_z.t(), hidden[part])
            elif d_weight is not None:
                d_weight += d_z.t() @ hidden[part]
        d_weight = d_weight.to(weight.dtype) if d_weight is not None else None
        d_bias = d_bias.to(bias.dtype) if d_bias is not None else None
        return d_hidden, d_weight, d_bias, None, None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    """[C, V] in `dtype`: the product in the model's own precision, as its head computes it, all else in `dtype`."""
    z = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    return z if temperature == 1.0 else z.div_(temperature)
