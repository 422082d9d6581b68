"""What a rank of the FSDP backend needs on its device."""

from __future__ import annotations

from corerl.config import ClusterInfo
from corerl.kinds import MemoryKind, ModelSize
from corerl.plugin import RankMemory
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.slow import not_compiled

FLOAT32 = 4


def memory(config: FsdpConfig, cluster: ClusterInfo, size: ModelSize) -> RankMemory:
    """Shards of what is trained are float32, others in the precision of the passes. A unit is gathered in that
    precision, on a single rank too, the next one while a layer computes; its gradients become float32 to be reduced."""
    half = FLOAT32 if cluster.train is None or cluster.train.precision == "float32" else 2
    shards = config.shard_size or cluster.ranks
    share = -(-size.trained // shards)
    frozen = -(-size.total // shards) if cluster.frozen or size.adapters else 0
    root, layer = size.head + size.rest, max(size.layers, default=0)
    if not size.head:
        root += size.embedding
    masters = 0 if cluster.frozen else FLOAT32 * share
    once = config.reduces_once(cluster.ranks, adds=cluster.streamed)
    gradients = FLOAT32 * (size.trained if once else share)
    if cluster.streamed and (once or shards < cluster.ranks):
        gradients += FLOAT32 * share  # of earlier calls, beside those that wait for the last micro-batch
    whole = size.total + size.adapters
    moved = size.adapters // max(1, len(size.layers)) if size.adapters else layer
    return RankMemory(
        kinds={
            MemoryKind.PARAM: 0 if config.offload == "parameters" else half * frozen + masters,
            MemoryKind.GRAD: 0 if config.offload == "parameters" else gradients,
            MemoryKind.OPTIMIZER: 2 * FLOAT32 * share if config.offload == "none" else 0,
        },
        gradients_grow=True,
        gathered=half * (whole if config.keeps_gathered(whole, half) else root + 2 * layer),
        # The root's gradients wait for the end of the backward pass.
        reducing=half * ((0 if size.adapters else root) + moved) + FLOAT32 * moved,
        fused=config.compile is True
        or (config.compile == "auto" and cluster.device == "cuda" and not not_compiled(cluster, size)),
    )
