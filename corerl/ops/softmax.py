"""The two passes of log-probs over logits: the sums of each row, and the gradient, which may overwrite the logits.

On a GPU with Triton each is one kernel, which reads every logit once; elsewhere it is a few torch operators.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from corerl.ops.buildable import why_unbuildable

# The logit of padding, and of what a model rules out by -inf: exp() makes it 0, and multiplied by that 0 it is not NaN,
# as -inf would be.
NEVER = -1e30


class RowSums(NamedTuple):
    """Sums over each row of tempered logits x [C, V], each [C], in float32 (float64 for float64 logits)."""

    chosen: Tensor  # [C, K] x_y of each target y
    peak: Tensor  # m = max_j x_j
    total: Tensor  # A = sum_j exp(x_j - m)
    spread: Tensor  # B = sum_j exp(x_j - m) (x_j - m); 0 if not requested


class Slopes(NamedTuple):
    """Coefficients of a loss's gradient in the logits of C tokens, each [C]: d_j = p_j (falls + slope log p_j), plus
    the `rises` of those targets that are j."""

    falls: Tensor
    rises: Tensor  # [C, K]
    slope: Tensor | None  # None if the entropy is not part of the loss

    def of(self, part: slice) -> Slopes:
        """Those of some of the tokens."""
        return Slopes(self.falls[part], self.rises[part], None if self.slope is None else self.slope[part])


def row_sums(logits: Tensor, targets: Tensor, *, temperature: float, real: int, with_spread: bool) -> RowSums:
    """Row sums of `logits` [C, V] / temperature, leaving out the padding columns from `real` on; targets [C, K] int64.

    For a target outside the real columns torch raises IndexError or yields padding's -1e30; a kernel yields NaN.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.zeros(targets.shape, dtype=exact, device=logits.device)
    sums = RowSums(chosen, *torch.zeros((3, len(logits)), dtype=exact, device=logits.device))
    if logits.is_meta:
        return sums
    if (kernels := kernels_for(logits)) is not None:
        kernels.row_sums(logits, targets, sums, temperature=temperature, real=real, with_spread=with_spread)
        return sums
    x = _tempered(logits, temperature, real)
    torch.amax(x, -1, out=sums.peak)
    torch.gather(x, -1, targets, out=chosen)
    below = torch.sub(x, sums.peak[:, None], out=x if x is not logits else None)
    if with_spread:
        below.clamp_(min=NEVER)
    powers = below.exp() if with_spread else below.exp_()
    torch.sum(powers, -1, out=sums.total)
    if with_spread:
        torch.sum(powers.mul_(below), -1, out=sums.spread)
    return sums


def gradient_(
    logits: Tensor, targets: Tensor, normalizer: Tensor, slopes: Slopes, *, temperature: float, real: int
) -> Tensor:
    """The gradient [C, V] given by `slopes`, in the dtype of `logits` [C, V], whose storage it may reuse.

    normalizer [C] is m + log A, so that log p = x - normalizer. Each element is rounded to that dtype only once, since
    for a likely target `falls` and `rises` almost cancel. The gradient of padding is exactly 0. Targets [C, K] of a
    token may be equal.
    """
    if logits.is_meta:
        return logits
    if (kernels := kernels_for(logits)) is not None:
        kernels.gradient_(logits, targets, normalizer, slopes, temperature=temperature, real=real)
        return logits
    x = _tempered(logits, temperature, real)
    log_p = torch.sub(x, normalizer[:, None], out=x if x is not logits else None)
    if slopes.slope is not None:
        p = log_p.clamp_(min=NEVER).exp()
        factor = torch.addcmul(slopes.falls[:, None], log_p, slopes.slope[:, None], out=log_p)
    else:
        p, factor = log_p.exp_(), slopes.falls[:, None]
    return torch.mul(p, factor, out=p).scatter_add_(-1, targets, slopes.rises).to(logits.dtype)


def _tempered(logits: Tensor, temperature: float, real: int) -> Tensor:
    """`logits` / temperature in float32 or float64, padding masked; `logits` itself if there is nothing to do."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    padded = real < x.shape[1]
    if x is logits and (padded or temperature != 1.0):
        x = logits.clone()
    if temperature != 1.0:
        x.div_(temperature)
    if padded:
        x[:, real:] = NEVER
    return x


def in_place(logits: Tensor) -> bool:
    """Whether the gradient of `logits`, or of the logits of such hidden states, overwrites them and takes no other
    memory: by kernels, and on meta, which stands for a GPU."""
    return logits.is_meta or kernels_for(logits) is not None


def kernels_for(logits: Tensor) -> ModuleType | None:
    """The kernels to use for `logits`; None for torch operators."""
    return _kernels() if logits.is_cuda and logits.dtype != torch.float64 and logits.numel() else None


@functools.cache
def _kernels() -> ModuleType | None:
    if why_unbuildable():
        return None
    from corerl.ops import kernels

    return kernels
