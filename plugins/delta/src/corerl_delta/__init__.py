"""Weight transports of CoreRL by files: whole weights, or only what has changed."""

from corerl.plugin import Capability, TransportSpec

DISK = TransportSpec(
    sender="corerl_delta.disk:DiskSender",
    receiver="corerl_delta.disk:DiskReceiver",
    capability=Capability.UPDATE_DISK,
    api=(2, 0),
    summary="safetensors files in a shared directory",
    abandon="corerl_delta.disk:DiskReceiver.abandon",
)
DELTA = TransportSpec(
    sender="corerl_delta.transport:DeltaSender",
    receiver="corerl_delta.transport:DeltaReceiver",
    capability=Capability.UPDATE_DISK,  # the same stream in other files
    api=(2, 0),
    summary="what has changed since the previous update, in files of a shared directory",
    abandon="corerl_delta.transport:DeltaReceiver.abandon",
)
