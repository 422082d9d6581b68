"""Models of the measured shapes without their files: configs, the FLOPs of a step, weights drawn where they are used.

Model FLOPs of an optimizer step: 6 N T + 6 L H sum(s^2). N are the matrices that a token passes through: all but the
embedding, of experts the chosen ones. The second term is causal attention: 12 L H T s / 2 for T tokens in sequences of
s each, with H the width of all query heads together. Recomputing counts for nothing. MFU is these, over seconds x GPUs
x 989 TFLOP/s, the dense bf16 peak of an H100 or H200, for FP8 too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corerl.types import IntArray

PEAK = 989e12  # FLOP/s
GIB = 2**30

COMMON = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_8B = {
    **COMMON,
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
SLICE = {**QWEN3_8B, "num_hidden_layers": 8}  # 2.79 B parameters
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def flops(fields: Mapping[str, Any], lengths: IntArray) -> float:
    """Of the model, forward and back, for one step on sequences of `lengths` [B] tokens; the formula stands above."""
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    queries, keys = (fields[name] * fields["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if experts := fields.get("num_experts"):
        mlp = 3 * hidden * fields["moe_intermediate_size"] * fields["num_experts_per_tok"] + hidden * experts
    else:
        mlp = 3 * hidden * fields["intermediate_size"]
    matrices = layers * (attention + mlp) + fields["vocab_size"] * hidden
    exact = lengths.astype(np.float64)
    return float(6 * matrices * exact.sum() + 6 * layers * queries * (exact**2).sum())


class QuickWeights:
    """Random weights, drawn where they are used. A box is equal on every rank that reads it, and not to what another
    layout reads: enough for a measurement. CoreRL's own source draws each value by its place, on the CPU.

    All are numbers of bfloat16: from others float32 masters would begin beside what the bare loop's begin at."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if len(sizes) < 2:
            return torch.ones(tuple(sizes), device=self._device)
        seed = zlib.crc32(repr((name, *offsets, *sizes)).encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.randn(tuple(sizes), generator=generator, device=self._device) * 0.02
        return drawn.bfloat16().float()
