"""FSDP's part of the chunk map: the boxes of HF tensors in this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from corerl.models import HFBox, local_chunks
from corerl.weights import Chunk
from corerl_fsdp.boxes import dtensor_boxes


def shard_chunks(
    params: Mapping[str, DTensor], values: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[HFBox]]
) -> list[Chunk]:
    """Chunks of `values`: weights or a moment, by parameter, each in the shape of the local shard."""
    chunks: list[Chunk] = []
    for name, param in params.items():
        if name not in values:
            continue  # this rank has no element of it
        replica = is_replica(param)
        for offsets, sizes, view in dtensor_boxes(param, values[name]):
            chunks += local_chunks(boxes[name], offsets, sizes, view, replica=replica)
    return chunks


def is_replica(param: DTensor) -> bool:
    """Whether an earlier rank holds the same shard."""
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    return any(placement.is_replicate() and at for placement, at in zip(param.placements, coordinate, strict=True))
