"""What a rank of the DeepSpeed backend needs on its device."""

from __future__ import annotations

from corerl.config import ClusterInfo
from corerl.kinds import MemoryKind, ModelSize
from corerl.plugin import RankMemory
from corerl_deepspeed.config import DeepSpeedConfig

FLOAT32 = 4


def memory(config: DeepSpeedConfig, cluster: ClusterInfo, size: ModelSize) -> RankMemory:
    """Weights in the precision of the passes, sharded in stage 3; of what is trained float32 masters and moments,
    sharded, and float32 gradients, sharded from stage 2 on, and the buckets in which they are reduced."""
    half = FLOAT32 if cluster.train is None or cluster.train.precision == "float32" else 2
    share = -(-size.trained // cluster.ranks)
    layer = max(size.layers, default=0)
    outside = size.embedding + size.head + size.rest
    offloads = config.offload != "none"
    bucket = FLOAT32 * min(config.reduce_bucket, size.trained)
    held = size.total + size.adapters
    gathered = 0
    if config.stage == 3 and cluster.ranks > 1:
        gathered = half * min(size.total, outside + 2 * layer + config.gather_bucket)
    weights = half * (-(-held // cluster.ranks) if config.stage == 3 else held)
    if config.node_shard_size > 1 and not cluster.frozen:
        weights += half * -(-held // config.node_shard_size)
    gradients = FLOAT32 * (size.trained if config.stage == 1 else share)
    return RankMemory(
        kinds={
            MemoryKind.PARAM: 0 if config.offload == "parameters" else weights,
            MemoryKind.MASTER: 0 if offloads else FLOAT32 * share,
            # With the optimizer on the host, stages 1 and 2 still sum gradients on the device.
            MemoryKind.GRAD: bucket * (2 if config.stage == 2 else 1)
            + (0 if offloads and config.stage == 3 else gradients),
            MemoryKind.OPTIMIZER: 0 if offloads else 2 * FLOAT32 * share,
        },
        gathered=gathered,
        reducing=half * layer,
    )
