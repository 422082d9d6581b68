"""The usual weight transports of CoreRL: by handle within a device, and by broadcast."""

from corerl.plugin import Capability, TransportSpec

IPC = TransportSpec(
    sender="corerl_transports.ipc:IpcSender",
    receiver="corerl_transports.ipc:IpcReceiver",
    capability=Capability.UPDATE_IPC,
    api=(2, 0),
    summary="CUDA IPC, or shared memory on a CPU, between the processes of one device",
    one_device=True,
)
COLLECTIVE = TransportSpec(
    sender="corerl_transports.collective:CollectiveSender",
    receiver="corerl_transports.collective:CollectiveReceiver",
    capability=Capability.UPDATE_COLLECTIVE,
    api=(2, 0),
    summary="broadcasts in a group of ranks and engines, over NCCL or gloo",
    one_group=True,
)
