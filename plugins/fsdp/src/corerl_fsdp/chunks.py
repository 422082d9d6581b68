"""FSDP's part of the chunk map: which boxes of which HF tensors lie in this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from corerl.models.names import HFBox, dtensor_boxes, local_chunks
from corerl.weights.chunks import Chunk


def shard_chunks(
    params: Mapping[str, DTensor], values: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[HFBox]]
) -> list[Chunk]:
    """Chunks of `values`: for each parameter a tensor of its local shard's shape, its weights or a moment."""
    chunks: list[Chunk] = []
    for name, param in params.items():
        if name not in values:
            continue  # no element of it is on this rank
        for offsets, sizes, view in dtensor_boxes(param, values[name]):
            chunks += local_chunks(boxes[name], offsets, sizes, view)
    return chunks
