"""Which slow paths a run takes: layers, or attention alone, in plain torch instead of TransformerEngine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from corerl.config import ClusterInfo
from corerl.kinds import InPieces, ModelSize
from corerl.plugin import UNMEASURED, SlowPath, slow_attention
from corerl_megatron.config import MegatronConfig, too_precise
from corerl_megatron.families import architecture, unsupported_by

# SmolLM2-135M and Qwen3-0.6B on one H100: benchmarks/results/h100-slow-paths.md.
WITHOUT_ENGINE = "a step takes 0.7 to 1.1 times as long as with FSDP's compiled layers"
INSTALL = "install TransformerEngine, as `corerl doctor megatron` says"


def slow(config: MegatronConfig, cluster: ClusterInfo, size: ModelSize) -> Iterator[SlowPath]:
    why, instead = without_engine(config, cluster)
    if why:
        yield SlowPath(
            path="transformer", text=f"layers are plain torch, because {why}", price=WITHOUT_ENGINE, instead=instead
        )
    if why or size.in_pieces is InPieces.SINKS:  # which TransformerEngine has no kernel for either
        yield from slow_attention(cluster, size)
    if config.context_parallel > 1 and (why or size.in_pieces is InPieces.SINKS or _windows(config, cluster)):
        yield SlowPath(
            path="context_parallel",
            text="attention in plain torch goes through the sequences of a micro-batch one by one, and gathers the "
            "keys and values of all ranks",
            price=UNMEASURED,
            instead=instead if why else "set it to 1; TransformerEngine has no such attention over several ranks",
        )


def without_engine(config: MegatronConfig, cluster: ClusterInfo) -> tuple[str, str]:
    """Why layers on a GPU do without TransformerEngine, and what to do about it; "" if they have it, or may have it on
    another machine."""
    if config.transformer == "torch":
        return "that is 'torch'", "set it to 'auto'"
    if config.transformer == "transformer_engine" or config.fp8 != "none":
        return "", ""
    if cluster.train is not None and too_precise(config, cluster.train.precision):
        return (
            f"TransformerEngine has no attention for context_parallel={config.context_parallel} in float32",
            "set train.precision to 'bfloat16'",
        )
    if not cluster.elsewhere and importlib.util.find_spec("transformer_engine") is None:
        return "TransformerEngine is not installed", INSTALL
    return "", ""


def _windows(config: MegatronConfig, cluster: ClusterInfo) -> bool:
    """Whether layers of the plugin's own have any."""
    known = cluster.model and not config.bridge and not unsupported_by(cluster.model)
    return bool(known and architecture(cluster.model, value_head=False).transformer.get("window_size"))
