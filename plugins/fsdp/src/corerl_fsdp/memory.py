"""What a rank of the FSDP backend needs on its device."""

from __future__ import annotations

from corerl.config import ClusterInfo
from corerl.kinds import MemoryKind, ModelSize
from corerl.plugin import RankMemory
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.slow import not_compiled

FLOAT32 = 4


def memory(config: FsdpConfig, cluster: ClusterInfo, size: ModelSize) -> RankMemory:
    """Shards are float32, those of a frozen role in the precision of the passes. A unit is gathered in that precision,
    on a single rank too, the next one while a layer computes; its gradients become float32 to be reduced."""
    half = FLOAT32 if cluster.train is None or cluster.train.precision == "float32" else 2
    share = -(-size.total // (config.shard_size or cluster.ranks))
    root, layer = size.head + size.rest, max(size.layers, default=0)
    if not size.head:
        root += size.embedding
    held = half if cluster.frozen else FLOAT32
    gradients = FLOAT32 * (size.total if config.sync == "last" else share)
    return RankMemory(
        kinds={
            MemoryKind.PARAM: 0 if config.offload == "parameters" else held * share,
            MemoryKind.GRAD: 0 if config.offload == "parameters" else gradients,
            MemoryKind.OPTIMIZER: 2 * FLOAT32 * share if config.offload == "none" else 0,
        },
        gradients_grow=True,
        gathered=half * (root + (2 * layer if config.reshard_after_forward else sum(size.layers))),
        # The root's gradients wait for the end of the backward pass.
        reducing=half * (root + layer) + FLOAT32 * layer,
        fused=config.compile is True
        or (config.compile == "auto" and cluster.device == "cuda" and not not_compiled(cluster, size)),
    )
