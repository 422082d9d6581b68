"""cuDNN's attention over packed sequences, which on Hopper takes 0.6 of the time of FlashAttention 2 for long ones.

It is called by the Python interface of its own package, nvidia-cudnn-frontend: torch's operators for packed sequences
(to 2.13) build cuDNN's plan anew in each call. A plan is built here for sizes rounded up to powers of two, so that
micro-batches of all lengths share a few.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import threading
import warnings
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIRST, LAST = (1, 16), (1, 26)  # versions of the package; 1.19.1 was run, and later ones choose among further kernels
HOPPER = (9, 0)
LARGEST_HEAD = 128  # that the backward pass on Hopper takes
# Tokens x those of the longest sequence x heads x their size, from which on it is faster: a call takes the host longer.
LEAST_WORK = 2**35

_thread = threading.local()  # cuDNN's handles belong to one thread; and `_places` of the last sequences


class _Use(IntEnum):
    """What a tensor of a plan is."""

    Q, K, V, OUT, LSE, LENGTHS, AT_Q, AT_KV, AT_LSE, GRAD, DQ, DK, DV = range(1, 14)


PLACES = (_Use.AT_Q, _Use.AT_KV, _Use.AT_LSE)


class Sizes(NamedTuple):
    """What a plan is for; numbers of sequences and tokens are upper bounds."""

    device: torch.device
    dtype: torch.dtype
    sequences: int
    longest: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int  # 0 if each token sees all before it


class _Plan(NamedTuple):
    graph: Any
    workspace: int  # bytes


def sizes_of(q: Tensor, k: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int) -> Sizes | None:
    """What `attention` and `attention_backward` take, of q [T, H, D], k [T, Hkv, D] and the sequences that `cu_seqlens`
    [S + 1] bounds, of at most `longest` tokens. With a `window` above 0 a token sees that many, itself among them.
    None where cuDNN is not to be asked."""
    if q.shape[2] > LARGEST_HEAD or q.numel() * longest < LEAST_WORK or not _present(q.device):
        return None
    sizes = Sizes(
        device=q.device,
        dtype=q.dtype,
        sequences=_rounded(len(cu_seqlens) - 1),
        longest=_rounded(longest),
        tokens=_rounded(len(q)),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        size=q.shape[2],
        scale=scale,
        window=window if window < longest else 0,
    )
    return sizes if _supported(sizes) else None


def _rounded(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _supported(sizes: Sizes) -> bool:
    """Whether cuDNN has plans for both passes; where it has not, a warning says so once."""
    try:
        _plan(sizes, backward=False)
        _plan(sizes, backward=True, deterministic=torch.are_deterministic_algorithms_enabled())
    except Exception as refused:  # the package's own classes, and of each of its steps another
        warnings.warn(f"attention is torch's, since cuDNN has no plan for it: {refused}", stacklevel=2)
        return False
    return True


@functools.cache
def _present(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER and _cudnn() is not None


@functools.cache
def _cudnn() -> Any:
    """The package's module; None if it is not installed, or in a version of another interface."""
    try:
        major, minor, *_ = importlib.metadata.version("nvidia-cudnn-frontend").split(".")
        return importlib.import_module("cudnn") if FIRST <= (int(major), int(minor)) <= LAST else None
    # Not there, without its library, or a development version.
    except (ImportError, OSError, AssertionError, ValueError):
        return None


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Causal attention [T, H, D] of q [T, H, D], k and v [T, Hkv, D] within their sequences, in the memory layout of q,
    and its log-sum-exp [T * H]."""
    given = {_Use.Q: q.contiguous(), _Use.K: k.contiguous(), _Use.V: v.contiguous()}
    out, lse = torch.empty_like(given[_Use.Q]), q.new_empty(len(q) * sizes.heads, dtype=torch.float32)
    found = {_Use.OUT: out, _Use.LSE: lse}
    _execute(_plan(sizes, backward=False), {**given, **found, **_places(cu_seqlens, sizes)}, sizes.device)
    return _as(q, out), lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each in the memory layout of what it is of."""
    uses = (_Use.Q, _Use.K, _Use.V, _Use.OUT, _Use.LSE, _Use.GRAD)
    given = {use: each.contiguous() for use, each in zip(uses, (q, k, v, out, lse, grad), strict=True)}
    found = {
        _Use.DQ: torch.empty_like(given[_Use.Q]),
        _Use.DK: torch.empty_like(given[_Use.K]),
        _Use.DV: torch.empty_like(given[_Use.V]),
    }
    plan = _plan(sizes, backward=True, deterministic=torch.are_deterministic_algorithms_enabled())
    _execute(plan, {**given, **found, **_places(cu_seqlens, sizes)}, sizes.device)
    dq, dk, dv = (_as(of, each) for of, each in zip((q, k, v), found.values(), strict=True))
    return dq, dk, dv


def _as(like: Tensor, x: Tensor) -> Tensor:
    """`x` in the memory layout of another tensor, which compiled layers expect."""
    return x if like.is_contiguous() else torch.empty_like(like).copy_(x)


def _places(cu_seqlens: Tensor, sizes: Sizes) -> dict[_Use, Tensor]:
    """Where each sequence begins in each tensor, in elements, and its length; those that fill up have none."""
    # All layers have the same ones: kept, since the host is what short micro-batches of small models wait for.
    given, found = _thread.__dict__.get("places", (None, None))
    if found is None or given() is not cu_seqlens:
        found = {}
        _thread.places = (weakref.ref(cu_seqlens), found)
    if sizes not in found:
        missing = sizes.sequences + 1 - len(cu_seqlens)
        bounds = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)]) if missing else cu_seqlens
        found[sizes] = {_Use.LENGTHS: bounds.diff(), **dict(zip(PLACES, bounds * _elements(sizes), strict=True))}
    return found[sizes]


@functools.cache
def _elements(sizes: Sizes) -> Tensor:
    """Of a token: in q, in k or v, and in the log-sum-exp."""
    per_token = [sizes.heads * sizes.size, sizes.kv_heads * sizes.size, sizes.heads]
    return torch.tensor(per_token, dtype=torch.int64, device=sizes.device)[:, None]


def _execute(plan: _Plan, tensors: dict[_Use, Tensor], device: torch.device) -> None:
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=device)
    # Addresses, since exchanging tensors takes longer than short attention does.
    addresses = {int(use): tensor.data_ptr() for use, tensor in tensors.items()}
    plan.graph.execute(addresses, workspace.data_ptr(), handle=_handle(device))


def _handle(device: torch.device) -> Any:
    cudnn = _cudnn()
    handles = _thread.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


@functools.cache
def _plan(sizes: Sizes, *, backward: bool, deterministic: bool = False) -> _Plan:
    """To cuDNN tensors of packed tokens are [sequences, heads, longest, size], each sequence at a place of its own."""
    cudnn = _cudnn()
    types, of_values = cudnn.data_type, cudnn.data_type.BFLOAT16
    if sizes.dtype is torch.float16:
        of_values = types.HALF
    graph = cudnn.pygraph(
        io_data_type=of_values,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(sizes.device),
    )

    def tensor(use: _Use, shape: Sequence[int], dtype: Any, strides: Sequence[int] = (1, 1, 1, 1)) -> Any:
        return graph.tensor(name=use.name, dim=list(shape), stride=list(strides), data_type=dtype, uid=int(use))

    places = {use: tensor(use, [sizes.sequences + 1, 1, 1, 1], types.INT64) for use in PLACES}
    lengths = tensor(_Use.LENGTHS, [sizes.sequences, 1, 1, 1], types.INT32)
    of_kv = {_Use.K, _Use.V, _Use.DK, _Use.DV}

    def packed(use: _Use, written: Any = None) -> Any:
        """A tensor that is given, or one that the graph writes."""
        heads, size, dtype, at = sizes.heads, sizes.size, of_values, _Use.AT_Q
        if use is _Use.LSE:
            size, dtype, at = 1, types.FLOAT, _Use.AT_LSE
        elif use in of_kv:
            heads, at = sizes.kv_heads, _Use.AT_KV
        shape = [sizes.sequences, heads, sizes.longest, size]
        strides = [sizes.longest * heads * size, size, heads * size, 1]
        if written is None:
            written = tensor(use, shape, dtype, strides)
        else:
            written.set_uid(int(use)).set_output(True).set_dim(shape).set_stride(strides).set_data_type(dtype)
        written.set_ragged_offset(places[at])
        return written

    how: dict[str, Any] = {
        "name": "attention",
        "attn_scale": sizes.scale,
        "use_padding_mask": True,
        "seq_len_q": lengths,
        "seq_len_kv": lengths,
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": sizes.window or None,
        "diagonal_band_right_bound": 0,
    }
    results: tuple[_Use, ...] = (_Use.DQ, _Use.DK, _Use.DV) if backward else (_Use.OUT, _Use.LSE)
    qkv = {"q": packed(_Use.Q), "k": packed(_Use.K), "v": packed(_Use.V)}
    if backward:
        found = graph.sdpa_backward(
            **qkv,
            o=packed(_Use.OUT),
            dO=packed(_Use.GRAD),
            stats=packed(_Use.LSE),
            max_total_seq_len_q=sizes.tokens,
            max_total_seq_len_kv=sizes.tokens,
            use_deterministic_algorithm=deterministic,
            **how,
        )
    else:
        found = graph.sdpa(**qkv, generate_stats=True, **how)
    for use, written in zip(results, found, strict=True):
        packed(use, written)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, graph.get_workspace_size())
