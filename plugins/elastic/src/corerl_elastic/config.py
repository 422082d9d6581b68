"""The options of the extension `elastic`."""

from __future__ import annotations

from attrs import frozen

from corerl.config import at_least, finite, option


@frozen(kw_only=True)
class ElasticOptions:
    scaler: str = option(
        "a function 'module:function' that is asked after each step whether groups should have other sizes, such as "
        "corerl_elastic:balance, which moves devices between the actor's ranks and the engines; empty: never",
        default="",
    )
    spare_timeout: float = option(
        "seconds to wait for other devices of the cluster in the place of those of a machine that is gone; after that, "
        "the groups that were on it go on smaller, on the devices that are left",
        default=60.0,
        validator=[at_least(0), finite],
    )
