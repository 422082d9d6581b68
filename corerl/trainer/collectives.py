"""How far this process has come, as torch.distributed counts it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def collectives_begun() -> dict[str, int]:
    """Collectives that this process has begun in each of its process groups, by the group's name and ranks. May be
    called from another thread while one goes on."""
    if not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    begun = {}
    for group, name in list(world.pg_names.items()):
        ranks = world.pg_group_ranks.get(group)  # missing in a group that is being made
        if ranks is not None:
            # gloo for host memory, NCCL for the device's; one that serves both is counted once.
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            begun[f"{name} {sorted(ranks)}"] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return begun
