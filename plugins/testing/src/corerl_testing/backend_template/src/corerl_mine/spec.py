"""The description that CoreRL reads before any worker exists; it must not import torch."""

from __future__ import annotations

from corerl.plugin import FULL, BackendSpec, Capability, not_implemented
from corerl_mine.config import MineConfig

SPEC = BackendSpec(
    implementation="corerl_mine.backend:MineBackend",
    config=MineConfig,
    api=(2, 2),
    summary="the whole model on every rank, gradients summed over ranks",
    # What is not listed counts as there, and is checked; but not AUX_LOSS, PICTURES, ADAM, TARGETS and SHARED_PREFIXES.
    capabilities={
        Capability.ADAM: FULL,
        Capability.TARGETS: FULL,
        Capability.AUX_LOSS: FULL,
        Capability.FLOAT16: not_implemented("it computes in float32 or bfloat16"),
        Capability.LORA: not_implemented("it trains all weights"),
        Capability.RECOMPUTE: not_implemented("it keeps all activations"),
    },
)
