"""The spec of the plain backend."""

from __future__ import annotations

from attrs import frozen

from corerl.plugin.capabilities import Capability, not_implemented, unsupported
from corerl.plugin.spec import BackendSpec


@frozen(kw_only=True)
class PlainConfig:
    """No options: all settings are in [train]."""


SPEC = BackendSpec(
    implementation="corerl.testing.plain.strict:StrictPlainBackend",
    config=PlainConfig,
    api=(1, 0),
    summary="one process in plain torch, the reference that other backends are compared with",
    capabilities={
        Capability.MULTI_RANK: unsupported("it is one process, to be read and compared with"),
        Capability.BFLOAT16: unsupported("it is a float32 reference"),
        Capability.FLOAT16: unsupported("it is a float32 reference"),
        Capability.RECOMPUTE: not_implemented("it keeps all activations"),
    },
)
