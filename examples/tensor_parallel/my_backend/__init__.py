"""What an entry point names: a tensor-parallel backend described, importable without torch."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from corerl.config import ClusterInfo, at_least, option
from corerl.plugin import FULL, BackendSpec, Capability, Problem, Variant, not_implemented


@frozen(kw_only=True)
class Options:
    tensor_parallel: int = option("ranks that hold one model together", default=1, validator=at_least(1))


def check(config: Options, cluster: ClusterInfo) -> Iterable[Problem]:
    parts = config.tensor_parallel
    if cluster.ranks % parts:
        yield Problem("tensor_parallel", f"{parts} does not divide {cluster.ranks} rank(s)")
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        if (size := cluster.model.get(field)) and size % parts:
            yield Problem("tensor_parallel", f"{parts} does not divide the model's {field} of {size}")


def data_parallel(config: Options, cluster: ClusterInfo) -> int:
    return cluster.ranks // config.tensor_parallel


SPEC = BackendSpec(
    implementation="my_backend.backend:TensorParallelBackend",
    config=Options,
    api=(2, 2),
    summary="linear layers, experts and embeddings divided over ranks that share samples",
    capabilities={
        Capability.ADAM: FULL,
        Capability.TARGETS: FULL,
        Capability.FLOAT16: not_implemented("it computes in float32 or bfloat16"),
        Capability.RECOMPUTE: not_implemented("it keeps all activations"),
        Capability.LORA: not_implemented("no adapters of divided layers"),
    },
    check=check,
    data_parallel=data_parallel,
    variants=[
        Variant(name="tensor parallel", options={"tensor_parallel": 2}),
        Variant(name="tensor and data parallel", options={"tensor_parallel": 2}, ranks=4),
    ],
)
