"""Options of this backend, set in [backends.mine]; those of all backends are in [train]."""

from __future__ import annotations

from attrs import frozen

from corerl.config import at_least, option


@frozen(kw_only=True)
class MineConfig:
    bucket_mib: int = option(
        "gradients that ranks exchange at once, in MiB; larger means fewer transfers and more temporary memory",
        default=16,
        validator=at_least(1),
    )
