"""What a rank of the Megatron backend needs on its device."""

from __future__ import annotations

from corerl.config import ALL_LINEAR, ClusterInfo
from corerl.kinds import MemoryKind, ModelSize
from corerl.plugin import RankMemory
from corerl_megatron.config import MegatronConfig
from corerl_megatron.families import architecture, linear_layers

FLOAT32 = 4
# What a layer keeps of each token in the width of hidden states: the inputs and outputs of its two norms.
AROUND_NORMS = 4


def memory(config: MegatronConfig, cluster: ClusterInfo, size: ModelSize) -> RankMemory:
    """Weights in the precision of the passes and float32 gradients, split by tensor, pipeline and expert parallelism;
    float32 masters and moments, which a distributed optimizer shards over data-parallel ranks as well. With adapters
    only these have gradients, masters and moments."""
    train = cluster.train
    half = FLOAT32 if train is None or train.precision == "float32" else 2
    tp, pp, cp, ep = (
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
        config.expert_parallel,
    )
    etp = config.expert_tensor_parallel or tp
    # The first stage has the embedding, the last one the head, which is a copy of the embedding if they are tied.
    here = len(size.layers) // pp
    stages = [slice(first, first + here) for first in range(0, len(size.layers), here)]
    experts = [sum(size.experts[stage]) / (ep * etp) for stage in stages]
    dense = [(sum(size.layers[stage]) - sum(size.experts[stage])) / tp for stage in stages]
    dense[0] += size.embedding / tp
    dense[-1] += (size.head + size.rest if size.head or pp == 1 else size.embedding + size.rest) / tp
    fullest = max(range(len(stages)), key=lambda stage: dense[stage] + experts[stage])
    copies, expert_copies = cluster.ranks // (tp * pp), cluster.ranks // (etp * ep * pp)
    weights = trained = masters = round(dense[fullest] + experts[fullest])
    if config.distributed_optimizer:
        masters = round(dense[fullest] / copies + experts[fullest] / expert_copies)
    if size.adapters:
        trained = masters = round(_adapters(config, cluster, size) / pp)
        weights += trained
        if config.distributed_optimizer:
            masters = -(-trained // copies)
    tokens = train.tokens_per_micro_batch if train is not None else 0
    replicated = 0
    if tp > 1 and not config.sequence_parallel and train is not None and train.recompute == "none":
        width = AROUND_NORMS * half * size.hidden
        replicated = round(tokens / cp * len(size.layers) * width * (1 - 1 / tp))
    return RankMemory(
        kinds={
            MemoryKind.PARAM: half * weights,
            MemoryKind.MASTER: FLOAT32 * masters if half < FLOAT32 else 0,
            MemoryKind.GRAD: FLOAT32 * trained,
            MemoryKind.OPTIMIZER: 2 * FLOAT32 * masters,
        },
        # The first of several stages holds a micro-batch of each stage, so many layers as one rank would of one.
        activations=1 / (tp * cp),
        replicated=replicated,
        fused=config.transformer != "torch",
    )


def _adapters(config: MegatronConfig, cluster: ClusterInfo, size: ModelSize) -> float:
    """Elements of all layers' adapters on a tensor-parallel rank."""
    if config.tensor_parallel == 1 or cluster.lora is None or not cluster.model:
        return size.adapters
    targets, rank = cluster.lora.targets or (ALL_LINEAR,), cluster.lora.rank or 0
    layers = [
        name
        for name in linear_layers(architecture(cluster.model, value_head=False))
        if any(target == ALL_LINEAR or f".{name}".endswith(f".{target}") for target in targets)
    ]
    # Of a layer that is split, each rank has the whole matrix on the side of hidden states: A, or B.
    whole = min(size.adapters, len(layers) * rank * size.hidden)
    return whole + (size.adapters - whole) / config.tensor_parallel
