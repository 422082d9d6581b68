"""The spec, which CoreRL reads before any worker exists."""

from __future__ import annotations

from collections.abc import Iterable

from corerl.config import ClusterInfo
from corerl.kinds import ModelSize
from corerl.plugin import (
    FULL,
    BackendSpec,
    Capability,
    Environment,
    Problem,
    SlowPath,
    Variant,
    not_implemented,
    slow_attention,
)
from corerl_deepspeed.config import DeepSpeedConfig
from corerl_deepspeed.memory import memory
from corerl_deepspeed.probe import probe
from corerl_deepspeed.raw import refusals

NO_FLOAT16 = (
    "DeepSpeed raises its loss scale before it divides gradients by it, which halves them in that step, and this "
    "backend has no loss scale of its own yet; bfloat16 has float32's range and needs none"
)


def environment(config: DeepSpeedConfig, cluster: ClusterInfo) -> Environment:
    # Otherwise DeepSpeed detects a device on import, and may find a GPU that the run does not use.
    return {"DS_ACCELERATOR": cluster.device}


def check(config: DeepSpeedConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    ranks, size = cluster.ranks, config.node_shard_size
    if config.offload == "parameters" and config.stage < 3:
        yield Problem(
            "offload", f"'parameters' with stage={config.stage}, which keeps all parameters on each device; set stage=3"
        )
    if size > 1 and config.stage < 3:
        yield Problem("node_shard_size", f"{size} with stage={config.stage}, which shards no parameters; set stage=3")
    if ranks % size:
        yield Problem(
            "node_shard_size", f"{size} does not divide the role's {ranks} ranks; use a divisor of {ranks}, or 1"
        )
    for path, text in refusals(config.raw, config.stage):
        yield Problem(f"raw.{path}", text)


def slow(config: DeepSpeedConfig, cluster: ClusterInfo, size: ModelSize) -> Iterable[SlowPath]:
    return slow_attention(cluster, size)


SPEC = BackendSpec(
    implementation="corerl_deepspeed.backend:DeepSpeedBackend",
    config=DeepSpeedConfig,
    api=(2, 2),
    summary="DeepSpeed ZeRO 1 to 3: transformers models sharded over all ranks, in host memory where asked",
    capabilities={
        Capability.AUX_LOSS: FULL,
        Capability.PICTURES: FULL,
        Capability.ADAM: FULL,
        Capability.TARGETS: FULL,
        Capability.EXPERT_LORA: FULL,
        Capability.SHARED_PREFIXES: FULL,
        Capability.FLOAT16: not_implemented(NO_FLOAT16),
    },
    environment=environment,
    check=check,
    memory=memory,
    slow=slow,
    probe=probe,
    variants=[
        Variant(name="stage 1", options={"stage": 1}),
        Variant(name="stage 2", options={"stage": 2}),
        Variant(name="stage 2, moments on the host", options={"stage": 2, "offload": "optimizer"}),
        Variant(name="moments on the host", options={"offload": "optimizer"}),
        Variant(name="parameters on the host", options={"offload": "parameters"}),
        Variant(name="a second copy in each node", options={"node_shard_size": 2}),
        Variant(
            name="small parameters kept",
            options={"raw": {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}},
        ),
    ],
)
