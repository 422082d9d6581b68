"""Log-probs and entropy of target tokens from logits, or from hidden states without ever holding all logits at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from corerl.ops.softmax import RowSums, Slopes, gradient_, in_place, row_sums

# Logits per chunk. Every chunk reads the whole weight and adds to its whole gradient, so fewer chunks are faster.
# 64 MiB and 1 GiB in float32, with a peak of up to 2.5 times that; with kernels 1 GiB in bfloat16, with no copies.
LOGITS = {"cpu": 2**24, "cuda": 2**28, "meta": 2**28, "kernels": 2**29}
# Of the memory that is free when a forward pass ends, what logits may take until its backward pass. Of a model with
# 0.6 billion parameters and a vocabulary of 152 k, their product is 4 of 18 parts of a step's.
KEPT = 1 / 8


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] of `targets` [T] under softmax((hidden weight^T + bias) / temperature), and its entropy [T]; or
    log-probs [T, K] of `targets` [T, K], of which two of a token may be equal.

    hidden [T, H], weight [V, H], bias [V]. Both results are float32 (float64 for float64 input); entropy is None unless
    requested. Logits are made for `chunk_tokens` tokens at a time, by default as many as make 2**24 logits (2**28 on a
    GPU, 2**29 with Triton). The first chunks that fit into an eighth of the GPU's free memory, on a CPU into 2**24
    logits, are kept for the backward pass, which computes the others again.

    With z the tempered logits, p = softmax(z), y the target and H = -sum_j p_j log p_j:

        d log p_y / d z_j = [j = y] - p_j          (summed over the K targets)
        d H       / d z_j = -p_j (log p_j + H)

    the second because dp_i/dz_j = p_i ([i = j] - p_j) and sum_i dp_i/dz_j = 0. The gradient of `weight` is summed over
    chunks in float32.

    With a `group`, its ranks share the rows of `weight` (and of `bias`): each holds V rows, rank r the rows r * V to
    (r + 1) * V of the whole matrix. All ranks call this with the same hidden states and targets, which are ids in the
    whole vocabulary. The results are equal on every rank and take two all-reduces of a few numbers per token; logits
    never leave their rank. The backward pass does not communicate: it yields the gradient of this rank's rows and, for
    `hidden`, **only the part that these rows contribute**. The caller sums those parts over the group, as the backward
    pass of a tensor-parallel region does. The loss must be the same on all ranks of the group.

    `vocab_size` is the number of real rows of the whole matrix; later rows are padding. They take no part in the
    softmax or the entropy, must not be targets, and their gradient is exactly zero.
    """
    chunk = chunk_tokens if chunk_tokens is not None else chunk_of(hidden, len(weight))
    shard = _shard(weight.shape[0], group, vocab_size)
    several = _several(targets)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    kept = kept_bytes(hidden) if learns else 0
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, weight, bias, several, temperature, with_entropy, chunk, shard, kept
    )
    return logprobs.view(targets.shape), entropy if with_entropy else None


def logprobs_of_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets`, [C] or [C, K], under softmax(logits / temperature) for logits [C, V], and its entropy
    [C], which is None unless requested; both float32 (float64 for float64 logits). Columns from `vocab_size` on are
    padding.

    As `token_logprobs`, for logits that something else than a single matrix makes. Keeps the logits for the backward
    pass: call it with as many tokens as there is memory for, and recompute.
    """
    real = _shard(logits.shape[1], None, vocab_size).real
    logprobs, entropy = _LogitLogprobs.apply(logits, _several(targets), temperature, with_entropy, real)
    return logprobs.view(targets.shape), entropy if with_entropy else None


def _several(targets: Tensor) -> Tensor:
    """[T, K] int64."""
    return (targets if targets.dim() == 2 else targets[:, None]).long()


def chunk_of(hidden: Tensor, rows: int) -> int:
    """The default number of tokens per chunk, for `rows` logits per token."""
    how = "kernels" if in_place(hidden) else hidden.device.type
    return max(1, LOGITS[how] // rows)


def kept_bytes(hidden: Tensor) -> int:
    """How many bytes of the logits of such hidden states are kept for the backward pass."""
    if hidden.is_cuda:
        free, _ = torch.cuda.mem_get_info(hidden.device)
        cached = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
        return int(KEPT * (free + cached))
    return 0 if hidden.is_meta else LOGITS["cpu"] * hidden.element_size()


class _Shard(NamedTuple):
    """The rows of the whole matrix that a rank holds."""

    group: dist.ProcessGroup | None  # None if this rank holds all rows
    first: int
    real: int  # number of real rows on this rank; padding follows


def _shard(rows: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> _Shard:
    ranks = dist.get_world_size(group) if group is not None else 1
    first = dist.get_rank(group) * rows if ranks > 1 else 0
    if vocab_size is not None and not 0 < vocab_size <= ranks * rows:
        raise ValueError(
            f"vocab_size is {vocab_size}, expected 1 to {ranks * rows}: the weight has {ranks} x {rows} rows"
        )
    real = rows if vocab_size is None else min(max(vocab_size - first, 0), rows)
    return _Shard(group if ranks > 1 else None, first, real)


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
        shard: _Shard,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        here, mine = _mine(targets, shard, len(weight))
        parts: list[RowSums] = []
        ctx.logits = {}  # by a chunk's first token
        for part in _chunks(len(hidden), chunk):
            logits = linear(hidden[part], weight, bias)
            # Under autocast they have another dtype than those that are computed again have, outside of it.
            if logits.dtype == hidden.dtype and (kept := kept - logits.nbytes) >= 0:
                ctx.logits[part.start] = logits
            parts.append(
                row_sums(logits, here[part], temperature=temperature, real=shard.real, with_spread=with_entropy)
            )
            del logits  # or the next ones would be made beside them
        sums = RowSums(*(torch.cat(each) for each in zip(*parts, strict=True)))
        if shard.group is not None and len(hidden):
            sums = _over_ranks(sums, mine, shard.group)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        return _results(ctx, sums, hidden, weight, bias, targets, with_entropy=with_entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        exact, shard, temperature = normalizer.dtype, ctx.shard, ctx.temperature
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if need_bias else None
        here, mine = _mine(targets, shard, len(weight))
        slopes = _slopes(d_logprobs, d_entropy, entropy, mine, temperature)
        for part in _chunks(len(hidden), ctx.chunk):
            logits = ctx.logits.pop(part.start, None)  # overwritten, so that another backward pass computes them
            d_z = gradient_(
                linear(hidden[part], weight, bias) if logits is None else logits,
                here[part],
                normalizer[part],
                slopes.of(part),
                temperature=temperature,
                real=shard.real,
            )
            if d_bias is not None:
                d_bias += d_z.sum(0, dtype=exact)
            if d_hidden is not None:
                torch.mm(d_z, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, d_z.t(), hidden[part])
        d_weight = d_weight.to(weight.dtype) if d_weight is not None else None
        d_bias = d_bias.to(bias.dtype) if d_bias is not None else None
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


class _LogitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, real: int
    ) -> tuple[Tensor, Tensor]:
        sums = row_sums(logits, targets, temperature=temperature, real=real, with_spread=with_entropy)
        ctx.temperature, ctx.real = temperature, real
        return _results(ctx, sums, logits, targets, with_entropy=with_entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        d_z = gradient_(
            # A kernel overwrites what it gets, and what made these logits may have kept them for its own gradient.
            logits.clone() if in_place(logits) else logits,
            targets,
            normalizer,
            _slopes(d_logprobs, d_entropy, entropy, torch.ones_like(targets, dtype=torch.bool), ctx.temperature),
            temperature=ctx.temperature,
            real=ctx.real,
        )
        return d_z, None, None, None, None


def _results(ctx: Any, sums: RowSums, *kept: Tensor | None, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy, for whose gradient `kept` is kept, and normalizer and entropy behind it."""
    log_total = sums.total.log()
    entropy = log_total - sums.spread / sums.total if with_entropy else torch.zeros_like(log_total)
    ctx.save_for_backward(*kept, sums.peak + log_total, entropy)
    if not with_entropy:
        ctx.mark_non_differentiable(entropy)
    ctx.set_materialize_grads(False)  # an entropy that is only a metric costs no gradient
    return (sums.chosen - sums.peak[:, None]) - log_total[:, None], entropy


def _slopes(
    d_logprobs: Tensor | None, d_entropy: Tensor | None, entropy: Tensor, mine: Tensor, temperature: float
) -> Slopes:
    """The coefficients of the gradient in the logits, from those in log-probs [T, K] and entropy [T]."""
    if d_logprobs is None:
        d_logprobs = torch.zeros_like(mine, dtype=entropy.dtype)
    falls, slope = -d_logprobs.sum(-1) / temperature, None
    if d_entropy is not None:
        slope = -d_entropy / temperature
        falls = falls + slope * entropy
    return Slopes(falls=falls, rises=d_logprobs * mine / temperature, slope=slope)


def _over_ranks(sums: RowSums, mine: Tensor, group: dist.ProcessGroup) -> RowSums:
    """Combine each rank's row sums into those over the whole vocabulary, the only communication in the forward pass.

    Each rank's sums are relative to the maximum m of its own logits: with M the maximum over all ranks, its A becomes
    exp(m - M) A and its B becomes exp(m - M) (B + (m - M) A).
    """
    highest = sums.peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    below = sums.peak - highest
    scale = below.exp()
    parts = [sums.chosen.where(mine, 0).flatten(), sums.total * scale, (sums.spread + below * sums.total) * scale]
    summed = torch.cat(parts)
    dist.all_reduce(summed, group=group)
    chosen, total, spread = summed.split([len(part) for part in parts])
    return RowSums(chosen=chosen.view_as(mine), peak=highest, total=total, spread=spread)


def _mine(targets: Tensor, shard: _Shard, rows: int) -> tuple[Tensor, Tensor]:
    """Each target as a local row number, 0 if another rank has it; and whether it is on this rank; both [T, K]."""
    if shard.group is None:
        return targets, torch.ones_like(targets, dtype=torch.bool)
    here = targets - shard.first
    mine = (here >= 0) & (here < rows)
    return here * mine, mine


def _chunks(tokens: int, chunk: int) -> list[slice]:
    """Slices of `chunk` tokens; at least one, which may be empty."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, max(tokens, 1), chunk)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with the product in the dtype of `total` if the device can do it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif total.is_meta:
        return  # as on a GPU, nothing else is allocated; torch 2.11 cannot call that on meta
    else:
        total += a @ b
