"""cuDNN's attention over packed sequences, which on Hopper takes about half the time of FlashAttention 2.

It is called by the Python interface of its own package, nvidia-cudnn-frontend: torch's operators for packed sequences
(to 2.13) build cuDNN's plan anew in each call. A plan is built here for sizes rounded up to powers of two, so that
micro-batches of all lengths share a few.
"""

from __future__ import annotations

import functools
import importlib
import threading
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOPPER = (9, 0)
LARGEST_HEAD = 128  # that the backward pass on Hopper takes
SHORTEST = 1024  # tokens of the longest sequence from which on it is faster

_thread = threading.local()  # cuDNN's handles belong to one thread


class _Use(IntEnum):
    """What a tensor of a plan is."""

    Q, K, V, OUT, LSE, LENGTHS, AT_Q, AT_KV, AT_LSE, GRAD, DQ, DK, DV = range(1, 14)


class _Sizes(NamedTuple):
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


def takes(q: Tensor, longest: int) -> bool:
    """Whether cuDNN computes the attention of q [T, H, D], within sequences of at most `longest` tokens."""
    return longest >= SHORTEST and q.shape[2] <= LARGEST_HEAD and _present(q.device)


@functools.cache
def _present(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER and _cudnn() is not None


@functools.cache
def _cudnn() -> Any:
    """The package's module; None if it is not installed."""
    try:
        return importlib.import_module("cudnn")
    except ImportError:
        return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention [T, H, D] of q [T, H, D], k and v [T, Hkv, D] within the sequences that `cu_seqlens` [S + 1]
    bounds, and its log-sum-exp [T * H]. With a `window` above 0 a token sees that many tokens, itself among them."""
    sizes = _sizes(q, k, cu_seqlens, longest, scale, window)
    out, lse = torch.empty_like(q), q.new_empty(len(q) * sizes.heads, dtype=torch.float32)
    given = {_Use.Q: q, _Use.K: k, _Use.V: v, _Use.OUT: out, _Use.LSE: lse}
    _execute(_forward(sizes), {**given, **_places(cu_seqlens, sizes)}, sizes.device)
    return out, lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = _sizes(q, k, cu_seqlens, longest, scale, window)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = {_Use.Q: q, _Use.K: k, _Use.V: v, _Use.OUT: out, _Use.LSE: lse, _Use.GRAD: grad}
    found = {_Use.DQ: dq, _Use.DK: dk, _Use.DV: dv}
    plan = _backward(sizes, torch.are_deterministic_algorithms_enabled())
    _execute(plan, {**given, **found, **_places(cu_seqlens, sizes)}, sizes.device)
    return dq, dk, dv


def _sizes(q: Tensor, k: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int) -> _Sizes:
    return _Sizes(
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


def _rounded(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def _places(cu_seqlens: Tensor, sizes: _Sizes) -> dict[_Use, Tensor]:
    """Where each sequence begins in each tensor, in elements, and its length; those that fill up have none."""
    missing = sizes.sequences + 1 - len(cu_seqlens)
    bounds = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)]) if missing else cu_seqlens
    at_q, at_kv, at_lse = (bounds * _elements(sizes)).unbind()
    return {_Use.LENGTHS: bounds.diff(), _Use.AT_Q: at_q, _Use.AT_KV: at_kv, _Use.AT_LSE: at_lse}


@functools.cache
def _elements(sizes: _Sizes) -> Tensor:
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
def _forward(sizes: _Sizes) -> _Plan:
    plan = _Planned(sizes)
    out, lse = plan.graph.sdpa(
        name="attention",
        q=plan.of(_Use.Q, sizes.heads),
        k=plan.of(_Use.K, sizes.kv_heads),
        v=plan.of(_Use.V, sizes.kv_heads),
        generate_stats=True,
        **plan.how,
    )
    plan.out(out, _Use.OUT, sizes.heads)
    shape, strides = plan.lse
    lse.set_uid(_Use.LSE).set_output(True).set_dim(shape).set_stride(strides).set_data_type(plan.cudnn.data_type.FLOAT)
    lse.set_ragged_offset(plan.at_lse)
    return plan.built()


@functools.cache
def _backward(sizes: _Sizes, deterministic: bool) -> _Plan:
    plan = _Planned(sizes)
    shape, strides = plan.lse
    lse = plan.graph.tensor(name="LSE", dim=shape, stride=strides, data_type=plan.cudnn.data_type.FLOAT, uid=_Use.LSE)
    lse.set_ragged_offset(plan.at_lse)
    grads = plan.graph.sdpa_backward(
        name="attention",
        q=plan.of(_Use.Q, sizes.heads),
        k=plan.of(_Use.K, sizes.kv_heads),
        v=plan.of(_Use.V, sizes.kv_heads),
        o=plan.of(_Use.OUT, sizes.heads),
        dO=plan.of(_Use.GRAD, sizes.heads),
        stats=lse,
        max_total_seq_len_q=sizes.tokens,
        max_total_seq_len_kv=sizes.tokens,
        use_deterministic_algorithm=deterministic,
        **plan.how,
    )
    for grad, use in zip(grads, (_Use.DQ, _Use.DK, _Use.DV), strict=True):
        plan.out(grad, use, sizes.heads if use is _Use.DQ else sizes.kv_heads)
    return plan.built()


class _Planned:
    """A plan that is being made: tensors of packed tokens are [sequences, heads, longest, size] to cuDNN, each sequence
    at a place of its own."""

    def __init__(self, sizes: _Sizes) -> None:
        self.sizes, self.cudnn = sizes, _cudnn()
        types, handle = self.cudnn.data_type, _handle(sizes.device)
        self.dtype = types.BFLOAT16 if sizes.dtype is torch.bfloat16 else types.HALF
        self.graph = self.cudnn.pygraph(
            io_data_type=self.dtype, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
        )
        of_bounds = [sizes.sequences + 1, 1, 1, 1]
        self.at_q, self.at_kv, self.at_lse = (
            self.graph.tensor(name=use.name, dim=of_bounds, stride=[1, 1, 1, 1], data_type=types.INT64, uid=use)
            for use in (_Use.AT_Q, _Use.AT_KV, _Use.AT_LSE)
        )
        lengths = self.graph.tensor(
            name="LENGTHS",
            dim=[sizes.sequences, 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=types.INT32,
            uid=_Use.LENGTHS,
        )
        self.lse = (
            [sizes.sequences, sizes.heads, sizes.longest, 1],
            [sizes.longest * sizes.heads, 1, sizes.heads, 1],
        )
        self.how: dict[str, Any] = {
            "attn_scale": sizes.scale,
            "use_padding_mask": True,
            "seq_len_q": lengths,
            "seq_len_kv": lengths,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": sizes.window or None,
            "diagonal_band_right_bound": 0,
        }

    def of(self, use: _Use, heads: int) -> Any:
        """A tensor that is given."""
        shape, strides = self._packed(heads)
        tensor = self.graph.tensor(name=use.name, dim=shape, stride=strides, data_type=self.dtype, uid=use)
        tensor.set_ragged_offset(self._at(heads))
        return tensor

    def out(self, tensor: Any, use: _Use, heads: int) -> None:
        """A tensor that is written."""
        shape, strides = self._packed(heads)
        tensor.set_uid(use).set_output(True).set_dim(shape).set_stride(strides).set_data_type(self.dtype)
        tensor.set_ragged_offset(self._at(heads))

    def _packed(self, heads: int) -> tuple[list[int], list[int]]:
        sizes = self.sizes
        shape = [sizes.sequences, heads, sizes.longest, sizes.size]
        return shape, [sizes.longest * heads * sizes.size, sizes.size, heads * sizes.size, 1]

    def _at(self, heads: int) -> Any:
        return self.at_q if heads == self.sizes.heads else self.at_kv

    def built(self) -> _Plan:
        graph, modes = self.graph, self.cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return _Plan(graph, graph.get_workspace_size())
