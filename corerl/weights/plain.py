"""Exchange plain data between ranks as JSON: torch's own way unpickles whatever another rank sends."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_plain(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The data of all ranks of `group` (None: of the default one), in their order. Called on every rank, with what JSON
    can hold; tuples arrive as lists."""
    member = group if group is not None else dist.distributed_c10d._get_default_group()
    on_host = torch.device("cpu") in member._device_types
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    ranks = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    everything = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everything, padded, group=group)
    return [json.loads(row[:length].cpu().numpy().tobytes()) for row, length in zip(everything, lengths, strict=True)]
