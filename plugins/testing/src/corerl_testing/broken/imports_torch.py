"""A spec that imports torch, which costs a second for everyone who just lists backends."""

from __future__ import annotations

import torch
from attrs import evolve

from corerl.plugin import Capability, unsupported
from corerl_testing.plain.spec import SPEC as PLAIN

SPEC = evolve(
    PLAIN,
    summary="wrong on purpose: importing the spec imports torch",
    capabilities={
        **PLAIN.capabilities,
        Capability.BFLOAT16: unsupported(f"it computes in {torch.float32}"),
    },
)
