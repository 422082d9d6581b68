"""What the entry point names: the transport described, importable without torch."""

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import Capability, TransportSpec


@frozen(kw_only=True)
class ZippedOptions:
    level: int = option("of zlib: 0 only copies, 9 takes longest", default=1, validator=at_least(0))


SPEC = TransportSpec(
    sender="corerl_zipped.files:ZippedSender",
    receiver="corerl_zipped.files:ZippedReceiver",
    capability=Capability.UPDATE_DISK,
    config=ZippedOptions,
    api=(2, 0),
    summary="compressed files in a shared directory",
    abandon="corerl_zipped.files:ZippedReceiver.abandon",
)
