"""Quantize weights for engines that compute in FP8, once, in the trainer, before they are sent.

The format is that of DeepSeek-V3's and Qwen3's FP8 checkpoints, `quant_method = "fp8"` with `weight_block_size = [128,
128]`: a linear layer's `X.weight` [n, k] becomes float8_e4m3fn [n, k], accompanied by `X.weight_scale_inv`
[ceil(n / 128), ceil(k / 128)] in float32, the factors to multiply each block by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from corerl.weights.adapters import is_adapter
from corerl.weights.manifest import Bucket, Entry, Manifest

BLOCK = 128  # rows and columns that share a scale
AT_ONCE = 2**24  # elements; bounds the temporaries on a device
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SCALE = "_scale_inv"  # suffix for the name of a weight's scales
ALIGNMENT = 16  # bytes; a tensor of any dtype may start there
# Linear layers are the matrices inside layers, without embeddings and head. As in those checkpoints, routers and the
# one-row gate of a shared expert are not quantized.
LINEAR = re.compile(r"(^|\.)layers\.\d+\..*\.weight$")
NOTHING: Mapping[str, Any] = {}
ROUTER = re.compile(r"\.(gate|shared_expert_gate)\.weight$")


def is_quantized(name: str, shape: tuple[int, ...], left_out: Sequence[str] = ()) -> bool:
    """Whether this HF tensor is sent in FP8. `left_out` are parts of names, as in `modules_to_not_convert`."""
    if is_adapter(name):
        return False
    linear = len(shape) == 2 and LINEAR.search(name) is not None and ROUTER.search(name) is None
    return linear and not any(part in name for part in left_out)


def as_sent(
    name: str, shape: tuple[int, ...], dtype: str, left_out: Sequence[str] = ()
) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of each tensor sent for this HF tensor: FP8 values and scales, or itself in `dtype`."""
    if not is_quantized(name, shape, left_out):
        return [(name, shape, dtype)]
    rows, columns = shape
    return [(name, shape, "float8_e4m3fn"), (name + SCALE, (-(-rows // BLOCK), -(-columns // BLOCK)), "float32")]


def converted_manifest(
    manifest: Manifest, left_out: Sequence[str] = (), *, fp8: bool = True, dtypes: Mapping[str, str] = NOTHING
) -> Manifest:
    """The manifest of the tensors as sent: the same buckets, in bytes, each tensor with its own dtype. With `fp8`,
    those that `is_quantized` names are; `dtypes` (name -> dtype) are of tensors that the manifest's would round."""
    buckets = []
    for bucket in manifest.buckets:
        entries: list[Entry] = []
        for entry in bucket.entries:
            plain = (entry.name, entry.shape, dtypes.get(entry.name, manifest.dtype))
            for name, shape, own in as_sent(*plain, left_out) if fp8 else [plain]:
                end = entries[-1].start + entries[-1].length if entries else 0
                entries.append(Entry(name, shape, -(-end // ALIGNMENT) * ALIGNMENT, own))
        buckets.append(Bucket(bucket.index, tuple(entries), bucket.stage_rank))
    return Manifest("uint8", tuple(buckets))


def convert_bucket(
    bucket: Bucket,
    flat: torch.Tensor,
    sent: Bucket,
    out: torch.Tensor,
    precise: Mapping[str, torch.Tensor] = NOTHING,
) -> None:
    """Write the tensors of `bucket`, in `flat` [bucket.numel], to `out` [sent.numel] in the format of `sent`; those of
    `precise` from there, since `flat` has them rounded."""
    out.zero_()  # the gaps between tensors too, as the checksum covers them
    views = sent.views(out)
    for name, tensor in bucket.views(flat).items():
        if name + SCALE in views:
            to_blocks(tensor, views[name], views[name + SCALE])
        else:
            views[name].copy_(precise.get(name, tensor))


def to_blocks(weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize `weight` [n, k] into FP8 `values` [n, k] and `scales` [ceil(n / 128), ceil(k / 128)], on its device.

    A block's scale is its largest magnitude / 448, which maps that to FP8's largest number; 1 for an all-zero block.
    Values are rounded to nearest, ties to even.
    """
    columns, across = weight.shape[1], scales.shape[1]
    blocks = max(1, AT_ONCE // (across * BLOCK * BLOCK))
    strips = zip(weight.split(blocks * BLOCK), values.split(blocks * BLOCK), scales.split(blocks), strict=True)
    for strip, into, scales_into in strips:
        missing = (0, -columns % BLOCK, 0, -len(strip) % BLOCK)
        padded = torch.nn.functional.pad(strip.float(), missing).view(-1, BLOCK, across, BLOCK)
        scale = padded.abs().amax(dim=(1, 3)) / LARGEST
        scales_into.copy_(torch.where(scale == 0, 1.0, scale))
        divided = (padded / scales_into[:, None, :, None]).view(-1, across * BLOCK)
        into.copy_(divided[: len(strip), :columns])
