"""Log-probs and entropy of target tokens from hidden states, without ever holding the logits of all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Of one chunk. Each reads the whole weight and adds to its whole gradient, which larger chunks do fewer times.
LOGITS = {"cpu": 2**24, "cuda": 2**28}  # 64 MiB and 1 GiB in float32; up to 2.5 times that at once
NEVER = -1e30  # a padding row's logit: exp() makes it 0, and unlike -inf it stays no NaN when multiplied by that 0


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
    """Log-probs [T] of `targets` [T] under softmax((hidden weight^T + bias) / temperature), and its entropy [T].

    hidden [T, H], weight [V, H], bias [V]. Both results are float32 (float64 for float64 input); entropy is None unless
    asked for. Logits exist for `chunk_tokens` tokens at a time, by default as many as make 2**24 logits (2**28 on a
    GPU); the backward pass makes them again instead of keeping them.

    With z the tempered logits, p = softmax(z), y the target and H = -sum_j p_j log p_j:

        d log p_y / d z_j = [j = y] - p_j
        d H       / d z_j = -p_j (log p_j + H)

    the second because dp_i/dz_j = p_i ([i = j] - p_j) and sum_i dp_i/dz_j = 0. The gradient of `weight` is summed over
    chunks in float32.

    With a `group`, its ranks share the rows of `weight` (and of `bias`): rank r holds rows r * V to (r + 1) * V of the
    whole matrix, V being the rows of each. All of them call this with the same hidden states and targets, which are
    ids in the whole vocabulary. The results are equal on every rank, and two all-reduces of a few numbers a token make
    them; logits never leave their rank. The backward pass communicates nothing: it gives the gradient of this rank's
    rows, and of `hidden` **this rank's part alone**, what its own rows contribute. The caller sums those parts over the
    group, as the backward pass of a tensor-parallel region does. The loss has to be the same on all ranks of the group.

    `vocab_size` is how many rows of the whole matrix are real; those from there on are padding. They have no part in
    the softmax or the entropy, no target may name one, and their gradient is exactly zero.
    """
    chunk = chunk_tokens if chunk_tokens is not None else max(1, LOGITS[hidden.device.type] // weight.shape[0])
    shard = _shard(weight.shape[0], group, vocab_size)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, with_entropy, chunk, shard)
    return logprobs, entropy if with_entropy else None


class _Shard(NamedTuple):
    """Which rows of the whole matrix a rank holds."""

    group: dist.ProcessGroup | None  # None where this rank holds them all
    first: int
    real: int  # of its rows; padding follows


def _shard(rows: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> _Shard:
    ranks = dist.get_world_size(group) if group is not None else 1
    first = dist.get_rank(group) * rows if ranks > 1 else 0
    if vocab_size is not None and not 0 < vocab_size <= ranks * rows:
        raise ValueError(f"vocab_size is {vocab_size}, and {ranks} x {rows} rows of weight want 1 to {ranks * rows}")
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
    ) -> tuple[Tensor, Tensor]:
        compute = _of_all_rows if shard.group is None else _of_shared_rows
        logprobs, normalizer, entropy = compute(hidden, weight, bias, targets, temperature, with_entropy, chunk, shard)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is a metric alone has no gradient, and costs none
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        exact, shard = normalizer.dtype, ctx.shard
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(normalizer)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if need_bias else None
        here, d_chosen = targets, d_logprobs
        if shard.group is not None:
            here, mine = _mine(targets, shard, len(weight))
            d_chosen = d_logprobs * mine
        # Factors of a token are put together here, so that its logits are passed over as few times as can be.
        falls, d_chosen = -d_logprobs / ctx.temperature, d_chosen / ctx.temperature
        if d_entropy is not None:
            slope = -d_entropy / ctx.temperature
            falls = falls + slope * entropy
        for part in _chunks(len(hidden), ctx.chunk):
            z = _logits(hidden[part], weight, bias, ctx.temperature, exact, shard)
            log_p = torch.sub(z, normalizer[part, None], out=z if z.dtype == exact else None)
            del z
            if d_entropy is not None:
                p = log_p.exp()
                factor = torch.addcmul(falls[part, None], log_p, slope[part, None], out=log_p)
            else:
                p, factor = log_p.exp_(), falls[part, None]
            chosen = here[part, None]
            # Rounded once: of a likely token, what falls and what rises almost cancel.
            d_z_chosen = p.gather(-1, chosen) * factor.expand_as(p).gather(-1, chosen) + d_chosen[part, None]
            d_z = torch.mul(p, factor, out=p if exact == hidden.dtype else torch.empty_like(p, dtype=hidden.dtype))
            del log_p, p, factor
            d_z.scatter_(-1, chosen, d_z_chosen.to(d_z.dtype))
            if d_bias is not None:
                d_bias += d_z.sum(0, dtype=exact)
            if d_hidden is not None:
                torch.mm(d_z, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, d_z.t(), hidden[part])
        d_weight = d_weight.to(weight.dtype) if d_weight is not None else None
        d_bias = d_bias.to(bias.dtype) if d_bias is not None else None
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _of_all_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    chunk: int,
    shard: _Shard,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, normalizers and entropies [T] (zero unless asked for), where this rank has the whole matrix."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.empty(len(hidden), dtype=exact, device=hidden.device)
    normalizer = torch.empty_like(logprobs)
    entropy = torch.zeros_like(logprobs)
    for part in _chunks(len(hidden), chunk):
        z = _logits(hidden[part], weight, bias, temperature, exact, shard).to(exact)
        log_p = z.log_softmax(-1)
        logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
        top = z.argmax(-1, keepdim=True)  # where log p is nearest 0, so least is lost in the difference
        normalizer[part] = (z.gather(-1, top) - log_p.gather(-1, top)).squeeze(-1)
        if with_entropy:
            log_p = torch.sub(z, normalizer[part, None], out=log_p)  # rounded as backward has it, for H + log p
            entropy[part] = -torch.exp(log_p, out=z).mul_(log_p).sum(-1)
    return logprobs, normalizer, entropy


def _of_shared_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    chunk: int,
    shard: _Shard,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where the group's ranks share the rows.

    Each rank reduces its own logits against their own maximum m, chunk by chunk: A = sum exp(z - m) and
    B = sum exp(z - m) (z - m). Only then do the ranks speak, once for all tokens: with M the maximum of all ranks, a
    rank's A becomes exp(m - M) A and its B exp(m - M) (B + (m - M) A). Their sums give the normalizer M + log A and
    the entropy log A - B / A.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    here, mine = _mine(targets, shard, len(weight))
    peak = torch.empty(len(hidden), dtype=exact, device=hidden.device)
    sums = peak.new_zeros((3, len(hidden)))
    total, spread, chosen = sums
    for part in _chunks(len(hidden), chunk):
        z = _logits(hidden[part], weight, bias, temperature, exact, shard).to(exact)
        peak[part] = z.amax(-1)
        chosen[part] = z.gather(-1, here[part, None]).squeeze(-1)
        z.sub_(peak[part, None])
        if with_entropy:
            powers = z.exp()
            total[part] = powers.sum(-1)
            spread[part] = powers.mul_(z).sum(-1)
        else:
            total[part] = z.exp_().sum(-1)
    if len(hidden):
        highest = peak.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=shard.group)
        below = peak - highest
        spread.add_(below * total).mul_(below.exp())
        total.mul_(below.exp())
        chosen.mul_(mine)
        dist.all_reduce(sums, group=shard.group)
        peak = highest
    log_total = total.log()
    normalizer = peak + log_total
    entropy = log_total - spread / total if with_entropy else torch.zeros_like(peak)
    return chosen - normalizer, normalizer, entropy


def _mine(targets: Tensor, shard: _Shard, rows: int) -> tuple[Tensor, Tensor]:
    """Each target as a row of this rank's, 0 where it is another's; and whether it is this rank's."""
    here = targets - shard.first
    mine = (here >= 0) & (here < rows)
    return here * mine, mine


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, exact: torch.dtype, shard: _Shard
) -> Tensor:
    """[C, V]: the product in the precision of the model, as its head computes it; in `exact` where more was done."""
    z = torch.nn.functional.linear(hidden, weight, bias)
    if temperature != 1.0:
        z = z.to(exact).div_(temperature)
    if shard.real < len(weight):
        z = z.to(exact)
        z[:, shard.real :] = NEVER
    return z


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the product in the dtype of `total` where the device can."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
