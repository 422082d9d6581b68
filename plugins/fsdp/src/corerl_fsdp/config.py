"""What only FSDP knows; everything common stands in [train]."""

from __future__ import annotations

from attrs import frozen

from corerl.config.schema import option


@frozen(kw_only=True)
class FsdpConfig:
    reshard_after_forward: bool = option(
        "free a layer's gathered weights after its forward pass and gather them again for backward: less memory, "
        "one more all-gather a layer",
        default=True,
    )
