"""The light description that CoreRL reads before any worker exists."""

from __future__ import annotations

from corerl.plugin.capabilities import Capability, not_implemented
from corerl.plugin.spec import BackendSpec
from corerl_fsdp.config import FsdpConfig

SPEC = BackendSpec(
    implementation="corerl_fsdp.backend:FsdpBackend",
    config=FsdpConfig,
    api=(1, 0),
    summary="torch FSDP2: any transformers model, parameters, gradients and moments sharded over all ranks",
    capabilities={
        Capability.CRITIC: not_implemented("no value head yet"),
        Capability.UPDATE_IPC: not_implemented("no sender of CUDA IPC handles yet"),
    },
)
