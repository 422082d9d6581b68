"""The spec of the plain backend."""

from __future__ import annotations

from attrs import frozen

from corerl.config import ClusterInfo
from corerl.kinds import MemoryKind, ModelSize
from corerl.plugin import FULL, BackendSpec, Capability, RankMemory, not_implemented, unsupported

FLOAT32 = 4
LOGITS = 6  # tensors of the size of all logits, at the peak of the backward pass


@frozen(kw_only=True)
class PlainConfig:
    """No options: all settings are in [train]."""


def memory(config: PlainConfig, cluster: ClusterInfo, size: ModelSize) -> RankMemory:
    """Weights, gradients and moments in float32, and several copies of all logits of a micro-batch."""
    tokens = 0 if cluster.train is None else cluster.train.tokens_per_micro_batch
    vocabulary = size.embedding // size.hidden
    return RankMemory(
        kinds={
            MemoryKind.PARAM: FLOAT32 * (size.total + size.adapters),
            MemoryKind.GRAD: FLOAT32 * size.trained,
            MemoryKind.OPTIMIZER: 2 * FLOAT32 * size.trained,
        },
        gradients_grow=True,
        replicated=LOGITS * FLOAT32 * tokens * vocabulary,
    )


SPEC = BackendSpec(
    implementation="corerl_testing.plain.strict:StrictPlainBackend",
    config=PlainConfig,
    api=(2, 2),
    summary="one process in plain torch, the reference that other backends are compared with",
    capabilities={
        Capability.MULTI_RANK: unsupported("it is one process, to be read and compared with"),
        Capability.BFLOAT16: unsupported("it is a float32 reference"),
        Capability.FLOAT16: unsupported("it is a float32 reference"),
        Capability.RECOMPUTE: not_implemented("it keeps all activations"),
        Capability.AUX_LOSS: FULL,
        Capability.PICTURES: FULL,
        Capability.ADAM: FULL,
        Capability.TARGETS: FULL,
        Capability.EXPERT_LORA: FULL,
        Capability.SHARED_PREFIXES: FULL,
    },
    memory=memory,
)
