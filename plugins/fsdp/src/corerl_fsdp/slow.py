"""Which slow paths a run takes: layers that are not compiled, and what all backends of transformers' models have."""

from __future__ import annotations

from collections.abc import Iterator

from corerl.config import ClusterInfo
from corerl.kinds import ModelSize
from corerl.ops import why_unbuildable
from corerl.plugin import UNMEASURED, SlowPath, slow_attention
from corerl_fsdp.config import FsdpConfig

# Qwen3-0.6B's shape on one H100, 15k and 65k tokens: benchmarks/results/h200-fsdp.md, "By default".
NOT_COMPILED = "a step takes 1.7 times as long"
# benchmarks/results/h100-slow-paths.md, against layers compiled around their attention.
IN_FLOAT32 = "a step takes 1.1 times as long"
IN_PIECES = "a step takes 1.4 times as long"


def slow(config: FsdpConfig, cluster: ClusterInfo, size: ModelSize) -> Iterator[SlowPath]:
    yield from slow_attention(cluster, size)
    if config.compile != "auto":
        return
    price, instead = NOT_COMPILED, "install that, or set it to false, which says no more of it"
    why = not_compiled(cluster, size)
    if not why and not cluster.elsewhere:
        why = why_unbuildable()
    elif cluster.train is not None and cluster.train.layout == "whole":
        price, instead = UNMEASURED, "only a model that can be packed avoids it"
    elif size.in_pieces:
        price, instead = IN_PIECES, "true compiles layers without their attention"
    elif why:
        price, instead = IN_FLOAT32, "set train.precision to 'bfloat16'; true compiles layers without their attention"
    if why:
        yield SlowPath(
            path="compile", text=f"'auto' does not compile layers, because {why}", price=price, instead=instead
        )


def not_compiled(cluster: ClusterInfo, size: ModelSize) -> str:
    """Why "auto" compiles no layers on GPUs that have what compiling needs; "" if it does."""
    if cluster.train is not None and cluster.train.layout == "whole":
        return "the model is whole, on padded rows"
    if size.in_pieces:
        return f"attention is not one kernel: {size.in_pieces}"
    if cluster.train is None or cluster.train.precision == "float32":
        return "float32 has no kernel for packed attention"
    return ""
