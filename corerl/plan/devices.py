"""What can be known of a run's devices before it starts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from corerl.config.schema import ClusterConfig, Config
from corerl.errors import ConfigError
from corerl.plan.roles import offloaded

AMPERE = (8, 0)  # the first compute capability with bfloat16


def resolve_device(device: str, *, address: str = "") -> str:
    """`auto` means cuda if torch sees a GPU on the driver's machine, whatever a cluster at `address` has.

    Raises ConfigError for `cuda` without a GPU; with a cluster at `address` it is not checked.
    """
    if device == "cuda" and address:
        return device
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("cluster.device: 'cuda', but torch sees no CUDA device here; use 'cpu' or 'auto'")
    return "cuda" if there and device != "cpu" else "cpu"


def has_bfloat16(cluster: ClusterConfig, device: str) -> bool:
    """Whether the GPUs of this machine compute in bfloat16; those of a cluster, which are not known yet, may."""
    if device != "cuda" or cluster.address:
        return True
    return all(torch.cuda.get_device_capability(index) >= AMPERE for index in range(torch.cuda.device_count()))


def device_memory(cluster: ClusterConfig) -> int:
    """Bytes of this machine's smallest GPU; 0 for a cluster, whose devices are not known yet."""
    if cluster.address:
        return 0
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def against_taking_turns(config: Config, device: str) -> Iterator[str]:
    """Problems, one line each, of settings that conflict with ranks and engines taking turns in device memory."""
    if not offloaded(config, device):
        return
    if config.weights.every > 1:
        yield (
            f"weights.every: {config.weights.every}, but engines that share memory with the ranks in turns get new "
            "weights every step; set it to 1, or cluster.offload='never', or cluster.placement='disaggregated'"
        )
    if config.rollout.source != "synchronous" and config.run.mode == "train":
        yield (
            f"rollout.source: {config.rollout.source!r} samples while ranks train, but here engines and ranks take "
            "turns in memory; set cluster.placement='disaggregated', or rollout.source='synchronous', or, if both fit "
            "in memory, cluster.offload='never'"
        )
