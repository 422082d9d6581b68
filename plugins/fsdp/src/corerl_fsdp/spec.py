"""The spec, which CoreRL reads before any worker exists."""

from __future__ import annotations

from collections.abc import Iterable

from corerl.config import ClusterInfo
from corerl.plugin import FULL, BackendSpec, Capability, Problem, Variant
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.memory import memory
from corerl_fsdp.probe import probe
from corerl_fsdp.slow import slow

NO_WHOLE_COMPILE = (
    "compile = true with train.layout='whole', whose layers are transformers' own code, is not supported; set it to "
    "false, or use a model that can be packed"
)


def check(config: FsdpConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    ranks, size = cluster.ranks, config.shard_size
    if size and ranks % size:
        yield Problem(
            "shard_size",
            f"{size} does not divide the role's {ranks} ranks; use a divisor of {ranks}, or 0 for all ranks",
        )
    if config.compile is True and cluster.train is not None and cluster.train.layout == "whole":
        yield Problem("compile", NO_WHOLE_COMPILE.removeprefix("compile = "))


SPEC = BackendSpec(
    implementation="corerl_fsdp.backend:FsdpBackend",
    config=FsdpConfig,
    api=(2, 2),
    summary="torch FSDP2: transformers models; parameters, gradients and moments sharded over all ranks",
    capabilities=dict.fromkeys(
        (
            Capability.AUX_LOSS,
            Capability.PICTURES,
            Capability.ADAM,
            Capability.TARGETS,
            Capability.EXPERT_LORA,
            Capability.SHARED_PREFIXES,
        ),
        FULL,
    ),
    check=check,
    memory=memory,
    slow=slow,
    probe=probe,
    variants=[
        Variant(name="moments on the host", options={"offload": "optimizer"}),
        Variant(name="parameters on the host", options={"offload": "parameters"}),
        Variant(name="replicas, reduced once", options={"shard_size": 1}),
        Variant(name="replicas of shards", options={"shard_size": 2}, ranks=4),
    ],
)
