"""Causal attention within each of several packed sequences: T tokens in, T tokens out."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from corerl.ops.padding import Rectangles, rectangles
from corerl.ops.upload import upload
from corerl.types import IntArray

LARGEST_HEAD = 256  # largest head size that the packed kernel takes


@frozen(eq=False)
class PackedSequences:
    """The layout of S sequences in T packed tokens; made once per micro-batch and used by every layer."""

    # `tokens` and `longest` are stored rather than computed from `bounds`: a compiled layer takes them as inputs.
    tokens: int  # T
    longest: int  # tokens of the longest sequence
    cu_seqlens: Tensor  # [S + 1] int32 on the device: sequence s is tokens[cu_seqlens[s]:cu_seqlens[s + 1]]
    bounds: IntArray  # the same on the host
    continuations: Tensor  # [T - S] int64 on the device: indices of all but the first token of each sequence

    @classmethod
    def of(cls, cu_seqlens: Tensor | IntArray, device: torch.device | str) -> PackedSequences:
        """Make it from [S + 1] bounds, such as `MicroBatch.cu_seqlens`.

        Raises ValueError unless they begin with 0 and never decrease.
        """
        host = cu_seqlens.cpu().numpy() if isinstance(cu_seqlens, Tensor) else np.asarray(cu_seqlens)
        bounds = host.astype(np.int64)
        if bounds.ndim != 1 or len(bounds) == 0 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seqlens must begin with 0 and never decrease, got {bounds.tolist()}")
        lengths = np.diff(bounds)
        continues = np.ones(int(bounds[-1]), dtype=np.bool_)
        continues[bounds[:-1][lengths > 0]] = False
        return cls(
            tokens=int(bounds[-1]),
            longest=int(lengths.max(initial=0)),
            cu_seqlens=upload(bounds.astype(np.int32), device),
            bounds=bounds,
            continuations=upload(np.flatnonzero(continues), device),
        )

    @cached_property
    def padded(self) -> tuple[Rectangles, Tensor | None, Tensor | None]:
        """Rectangles for kernels that cannot pack; gather and scatter on the device, None if no token moves."""
        layout = rectangles(self.bounds)
        if layout.in_place:
            return layout, None, None
        device = self.cu_seqlens.device
        return layout, upload(layout.gather, device), upload(layout.scatter, device)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v for q [T, H, D], k [T, Hkv, D] and v [T, Hkv, Dv], causal within each sequence; returns
    [T, H, Dv].

    H is a multiple of Hkv; each kv head serves H / Hkv adjacent query heads. A `scale` of None means D ** -0.5.
    Half precision on CUDA with heads of up to 256 runs one kernel over the packed tokens; everything else runs on
    padded rectangles.
    """
    if not len(q) == len(k) == len(v) == packing.tokens:
        raise ValueError(f"q, k, v have {len(q)}, {len(k)}, {len(v)} tokens, but their packing has {packing.tokens}")
    if one_kernel(q.device, q.dtype) and max(q.shape[2], v.shape[2]) <= LARGEST_HEAD:
        return _packed_kernel(q, k, v, packing, scale)
    return _padded(q, k, v, packing, scale)


def one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `packed_attention` runs as one kernel, which can be traced; else the host loops over rectangles."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _packed_kernel(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators, which needs a device

    # Causal attention: the window is unlimited to the left and 0 tokens to the right.
    options: dict[str, Any] = {"scale": q.shape[2] ** -0.5 if scale is None else scale, "window_size": (-1, 0)}
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in (varlen_attn.__kwdefaults__ or ()):  # torch 2.11's kernel does not group heads
            options["enable_gqa"] = True
        else:
            k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    cu, longest = packing.cu_seqlens, packing.longest
    # The kernel wants one head size for q, k and v, a multiple of 8. Zero padding changes no score and is cut off.
    size, width = -8 * (max(q.shape[2], v.shape[2]) // -8), v.shape[2]
    q, k, v = (x if x.shape[2] == size else pad(x, (0, size - x.shape[2])) for x in (q, k, v))
    out = varlen_attn(q, k, v, cu, cu, longest, longest, **options)
    assert isinstance(out, Tensor)  # a pair only if the softmax normalizer is requested
    return out if width == size else out[..., :width]


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float | None) -> Tensor:
    layout, gather, scatter = packing.padded
    if not layout.shapes:
        return q.new_zeros(*q.shape[:2], v.shape[2])
    if q.is_cuda and k.shape[1] != q.shape[1]:
        # The memory-efficient kernel cannot group heads; the kernel that can would hold all [L, L] scores.
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    if gather is not None:
        q, k, v = q.index_select(0, gather), k.index_select(0, gather), v.index_select(0, gather)
    cells = [rows * length for rows, length in layout.shapes]
    parts = []
    for shape, *qkv in zip(layout.shapes, q.split(cells), k.split(cells), v.split(cells), strict=True):
        # Padding is on the right: a causal mask hides it from all tokens, and its own outputs are dropped.
        a, b, c = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in qkv)
        part = scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=a.shape[1] != b.shape[1])
        parts.append(part.transpose(1, 2).flatten(0, 1))
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out if scatter is None else out.index_select(0, scatter)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
