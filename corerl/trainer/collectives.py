"""Count the collectives that this process has begun."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def collectives_begun() -> dict[str, int]:
    """Process group (name and ranks) -> collectives begun in it by this process. May be called from another thread
    during a collective."""
    if not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    begun = {}
    for group, name in list(world.pg_names.items()):
        ranks = world.pg_group_ranks.get(group)  # missing while a group is being made
        if ranks is not None:
            # gloo for host memory, NCCL for device memory; a backend that serves both is counted once.
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            begun[f"{name} {sorted(ranks)}"] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return begun
