"""A weight transport of CoreRL that writes only what has changed."""

from corerl.plugin import Capability, TransportSpec

SPEC = TransportSpec(
    sender="corerl_delta.transport:DeltaSender",
    receiver="corerl_delta.transport:DeltaReceiver",
    capability=Capability.UPDATE_DISK,  # the same stream in other files
    api=(2, 0),
    summary="what has changed since the previous update, in files of a shared directory",
    abandon="corerl_delta.transport:DeltaReceiver.abandon",
)
