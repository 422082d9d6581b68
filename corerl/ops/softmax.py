"""The two passes that log-probs make over logits: sums of each row, and the logits' gradient in their place.

On a GPU with Triton each is one kernel, which reads every logit once; elsewhere torch's operators do the same.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from corerl.ops.buildable import lacking

NEVER = -1e30  # a padding row's logit: exp() makes it 0, and unlike -inf it stays no NaN when multiplied by that 0


class RowSums(NamedTuple):
    """Of tempered logits x [C, V], each [C], in float32 (float64 for float64 logits)."""

    chosen: Tensor  # x_y of the target y
    peak: Tensor  # m = max_j x_j
    total: Tensor  # A = sum_j exp(x_j - m)
    spread: Tensor  # B = sum_j exp(x_j - m) (x_j - m); 0 where it was not asked for


class Slopes(NamedTuple):
    """How a loss changes with the log-probs and entropies of C tokens, each [C], as its gradient in the logits has it:
    d_j = p_j (falls + slope log p_j), and `rises` more where j is the target."""

    falls: Tensor
    rises: Tensor
    slope: Tensor | None  # None where the entropy has no part in the loss


def row_sums(logits: Tensor, targets: Tensor, *, temperature: float, real: int, with_spread: bool) -> RowSums:
    """Of `logits` [C, V] / temperature, whose columns from `real` on are padding with no part; targets [C] int64.

    A target that is none of the real columns is an IndexError, or padding's -1e30, by torch, and NaN by a kernel.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    sums = RowSums(*torch.zeros((4, len(logits)), dtype=exact, device=logits.device))
    if (kernels := kernels_for(logits)) is not None:
        kernels.row_sums(logits, targets, sums, temperature=temperature, real=real, with_spread=with_spread)
        return sums
    x = _tempered(logits, temperature, real)
    torch.amax(x, -1, out=sums.peak)
    sums.chosen.copy_(x.gather(-1, targets[:, None]).squeeze(-1))
    below = torch.sub(x, sums.peak[:, None], out=x if x is not logits else None)
    powers = below.exp() if with_spread else below.exp_()
    torch.sum(powers, -1, out=sums.total)
    if with_spread:
        torch.sum(powers.mul_(below), -1, out=sums.spread)
    return sums


def gradient_(
    logits: Tensor, targets: Tensor, normalizer: Tensor, slopes: Slopes, *, temperature: float, real: int
) -> Tensor:
    """The gradient [C, V] that `slopes` say, in the dtype of `logits` [C, V], whose storage it may take.

    normalizer [C] is m + log A, so that log p = x - normalizer. Each element is rounded to that dtype once: of a likely
    target, what falls and what rises almost cancel. That of padding is exactly 0.
    """
    if (kernels := kernels_for(logits)) is not None:
        kernels.gradient_(logits, targets, normalizer, slopes, temperature=temperature, real=real)
        return logits
    x = _tempered(logits, temperature, real)
    log_p = torch.sub(x, normalizer[:, None], out=x if x is not logits else None)
    if slopes.slope is not None:
        p = log_p.exp()
        factor = torch.addcmul(slopes.falls[:, None], log_p, slopes.slope[:, None], out=log_p)
    else:
        p, factor = log_p.exp_(), slopes.falls[:, None]
    chosen = targets[:, None]
    at_chosen = p.gather(-1, chosen) * factor.expand_as(p).gather(-1, chosen) + slopes.rises[:, None]
    d = torch.mul(p, factor, out=p if p.dtype == logits.dtype else torch.empty_like(logits))
    return d.scatter_(-1, chosen, at_chosen.to(d.dtype))


def _tempered(logits: Tensor, temperature: float, real: int) -> Tensor:
    """In float32 at least; `logits` themselves where nothing is to be done."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    padded = real < x.shape[1]
    if x is logits and (padded or temperature != 1.0):
        x = logits.clone()
    if temperature != 1.0:
        x.div_(temperature)
    if padded:
        x[:, real:] = NEVER
    return x


def kernels_for(logits: Tensor) -> ModuleType | None:
    """What passes over them, or over the logits of such hidden states; None where that is torch."""
    return _kernels() if logits.is_cuda and logits.dtype != torch.float64 and logits.numel() else None


@functools.cache
def _kernels() -> ModuleType | None:
    if lacking():
        return None
    from corerl.ops import softmax_kernels

    return softmax_kernels
