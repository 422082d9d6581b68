"""Causal attention within each of several packed sequences: T tokens in, T tokens out.

torch's FlashAttention kernel is an operator here, which `torch.compile` accepts. `torch.nn.attention.varlen` has one
too. That of torch 2.11 wants as many heads of keys as of queries, and each takes the longest sequence as a number,
which a compiled layer would be recompiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag, pad, scaled_dot_product_attention

from corerl.ops import cudnn
from corerl.ops.packing import PackedSequences

LARGEST_HEAD = 256  # largest head size that the packed kernel takes
ALIGNED = 8  # kernels for half precision want head sizes that are multiples of this
FULL = -1  # the `window` of a token that sees all before it
KERNEL, KERNEL_BACKWARD = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
NAME = "corerl::packed_attention"
PATHS = "Tensor? keys=None, Tensor? place=None, Tensor? copies=None, Tensor? first_copy=None"


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: PackedSequences,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(s) v with s = q k^T * scale for q [T, H, D], k [T, Hkv, D] and v [T, Hkv, Dv], causal within each
    sequence; returns [T, H, Dv].

    H is a multiple of Hkv; each kv head serves H / Hkv adjacent query heads. A `scale` of None means D ** -0.5. With a
    `window` a token sees that many tokens, itself among them. With a `softcap` c the scores are c * tanh(s / c).
    `sinks` [H] are scores of a further key, which every token sees and whose value is zero.

    Half precision on CUDA with heads of up to 256 runs one kernel over the packed tokens; everything else, as softcaps
    and sinks, runs on padded rectangles. With a softcap all scores of a rectangle exist at once.

    Of a packing with `prefixes`, T are the N tokens that go through the model, each of which sees its own sequence from
    the beginning. The kernel attends from each once; on rectangles a prefix attends in all of its sequences.
    """
    if not torch.compiler.is_compiling() and not len(q) == len(k) == len(v) == packing.tokens:
        raise ValueError(f"q, k, v have {len(q)}, {len(k)}, {len(v)} tokens, but their packing has {packing.tokens}")
    if softcap is not None and sinks is not None:
        raise ValueError("softcap and sinks are both given, expected at most one: no published model has both")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    fits = q.is_meta or (one_kernel(q.device, q.dtype) and max(q.shape[2], v.shape[2]) <= LARGEST_HEAD)
    if fits and softcap is None and sinks is None:
        return _packed_kernel(q, k, v, packing, scale, window)
    if (prefixes := packing.prefixes) is not None:
        q, k, v = (_rows_at(prefixes.place, each) for each in (q, k, v))
        apart = packed_attention(q, k, v, prefixes.sequences, scale, window=window, softcap=softcap, sinks=sinks)
        return _rows_at(prefixes.token, apart)
    if window is not None and window >= packing.longest:
        window = None
    if sinks is None:
        return _padded(q, k, v, packing, partial(_attend, scale=scale, window=window, softcap=softcap))
    # The further key is one in a further dim of all heads, in which each query has the score that its head gives it.
    q = torch.cat([q, (sinks / scale).to(q.dtype)[None, :, None].expand(len(q), -1, 1)], dim=2)
    q, k = pad(q, (0, ALIGNED - 1)), pad(k, (0, ALIGNED))
    if q.is_meta:  # where torch would take the kernel that holds all scores
        return _packed_kernel(q, k, v, packing, scale, window)
    return _padded(q, k, v, packing, partial(_attend_with_sink, scale=scale, window=window))


def _rows_at(index: Tensor, x: Tensor) -> Tensor:
    """x[index], whose backward pass is many times as fast on CPUs as index_select's, and repeatable on GPUs."""
    return embedding(index, x.flatten(1)).unflatten(1, x.shape[1:])


def one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `packed_attention` runs as one kernel, which can be traced; else the host loops over rectangles."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _packed_kernel(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float, window: int | None
) -> Tensor:
    # The kernel wants one head size for q, k and v. Zero padding changes no score and is cut off.
    size, width = -ALIGNED * (max(q.shape[2], v.shape[2]) // -ALIGNED), v.shape[2]
    q, k, v = (x if x.shape[2] == size else pad(x, (0, size - x.shape[2])) for x in (q, k, v))
    seen = FULL if window is None else window
    paths: tuple[Tensor, ...] = ()
    if (prefixes := packing.prefixes) is not None:
        paths = (prefixes.sequences.cu_seqlens, prefixes.place, prefixes.copies, prefixes.first_copy)
    out, _ = flash_attention(q, k, v, packing.cu_seqlens, packing.longest_on_host, scale, seen, *paths)
    return out if width == size else out[..., :width]


@torch.compiler.disable  # the layout is of the host, and each is another
def _padded(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """`attend`, which is given q, k and v of several rows of tokens, [B, H, L, D], on padded rectangles."""
    layout, gather, scatter = packing.padded
    if not layout.shapes:
        return q.new_zeros(*q.shape[:2], v.shape[2])
    if q.is_cuda and k.shape[1] != q.shape[1]:
        # The memory-efficient kernel cannot group heads; the kernel that can would hold all [L, L] scores.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if gather is not None:
        q, k, v = q.index_select(0, gather), k.index_select(0, gather), v.index_select(0, gather)
    cells = [rows * length for rows, length in layout.shapes]
    parts = []
    for shape, *qkv in zip(layout.shapes, q.split(cells), k.split(cells), v.split(cells), strict=True):
        # Padding is on the right: causality hides it from all tokens, and its own outputs are dropped.
        part = attend(*(x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in qkv))
        parts.append(part.transpose(1, 2).flatten(0, 1))
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out if scatter is None else out.index_select(0, scatter)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return _sdpa(q, k, v, None if window is None else _seen(q.shape[2], window, q.device), scale)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * (scale / softcap))
    weights = scores.masked_fill(~_seen(q.shape[2], window, q.device), -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def _attend_with_sink(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """With the further key as the first of each row. A query before all others keeps rows and columns equally many."""
    one = k.new_zeros(k.shape[3])
    one[-ALIGNED] = 1
    q, v = (pad(x, (0, 0, 1, 0)) for x in (q, v))
    k = torch.cat([one.expand(*k.shape[:2], 1, -1), k], dim=2)
    seen = None
    if window is not None:
        seen = _seen(q.shape[2], window, q.device)
        seen[:, 0] = True
    return _sdpa(q, k, v, seen, scale)[:, :, 1:]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    causal, grouped = seen is None, q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=grouped)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [L, L] each query sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


@torch.library.custom_op(
    NAME,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor longest, float scale, int window,"
    f" {PATHS}) -> (Tensor, Tensor)",
)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
    keys: Tensor | None = None,
    place: Tensor | None = None,
    copies: Tensor | None = None,
    first_copy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [T, H, D], k and v [T, Hkv, D] in half precision on CUDA, within the sequences that
    `cu_seqlens` [S + 1] bounds, of which the longest has `longest` [] tokens, on the host; a token sees `window`
    tokens, itself among them, or with FULL all. Returns [T, H, D] and the log-sum-exp of its scores, [H * T] in the
    kernel's own order. The kernel is cuDNN's where `cudnn.sizes_of` says so, else torch's FlashAttention.

    With shared prefixes, sequence s has as many of the last tokens of the one that `keys` [S + 1] bounds, and sees all
    of that, whose keys and values the other three name, as in `SharedPrefixes`: the kernel reads copies of those, as
    causality ends at the last token of both. Copies are made again in the backward pass, not kept for it."""
    at_most, left = int(longest), window - 1 if 0 < window < int(longest) else FULL
    if place is None and (sizes := cudnn.sizes_of(q, k, cu_seqlens, at_most, scale, left + 1)) is not None:
        return cudnn.attention(q, k, v, cu_seqlens, sizes)
    k, v = (each if place is None else each.index_select(0, place) for each in (k, v))
    out, lse, *_ = KERNEL(
        q, k, v, cu_seqlens, cu_seqlens if keys is None else keys, at_most, at_most, 0.0, left == FULL, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out, lse.flatten()


@torch.library.custom_op(
    f"{NAME}_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, Tensor longest,"
    f" float scale, int window, {PATHS}) -> (Tensor, Tensor, Tensor)",
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
    keys: Tensor | None = None,
    place: Tensor | None = None,
    copies: Tensor | None = None,
    first_copy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    at_most, left = int(longest), window - 1 if 0 < window < int(longest) else FULL
    if place is None and (sizes := cudnn.sizes_of(q, k, cu_seqlens, at_most, scale, left + 1)) is not None:
        return cudnn.attention_backward(grad, q, k, v, out, lse, cu_seqlens, sizes)
    lse = lse.view(q.shape[1], len(q))
    # Of dropout, which is off.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    read = [each if place is None else each.index_select(0, place) for each in (k, v)]
    keys = cu_seqlens if keys is None else keys
    dq, dk, dv = KERNEL_BACKWARD(
        grad, q, *read, out, lse, cu_seqlens, keys, at_most, at_most, 0.0, left == FULL, state, unused,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    if copies is not None and first_copy is not None:
        # Sums over copies, each in float32 and in the same order every time, as index_add's are not; with the strides
        # that compiled layers expect.
        dk, dv = (
            torch.empty_like(of).copy_(embedding_bag(copies, x.flatten(1), first_copy, mode="sum").view(of.shape))
            for of, x in ((k, dk), (v, dv))
        )
    return dq, dk, dv


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1] * q.shape[0], dtype=torch.float32)


@flash_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, longest, scale, window, *paths = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, longest, *paths)
    ctx.scale, ctx.window = scale, window


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *kept, keys, place, copies, first_copy = ctx.saved_tensors
    paths = (keys, place, copies, first_copy)
    return *flash_attention_backward(grad, *kept, ctx.scale, ctx.window, *paths), *[None] * 8


flash_attention.register_autograd(_gradients, setup_context=_keep)
