"""The registry of transports, by the name used in `Address.transport`."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from corerl.errors import ConfigError
from corerl.messages import did_you_mean
from corerl.weights.transport import Address, WeightSender
from corerl.weights.transports.collective import CollectiveReceiver, CollectiveSender
from corerl.weights.transports.delta import DeltaReceiver, DeltaSender
from corerl.weights.transports.disk import DiskReceiver, DiskSender, give_up
from corerl.weights.transports.ipc import IpcReceiver, IpcSender
from corerl.weights.transports.protocol import Receiver

AUTO = "auto"  # in a config: ipc if engines are on the ranks' devices, otherwise collective


@frozen(kw_only=True)
class Transport:
    """A transport's two ends, and what a run needs to know to use it."""

    sender: Callable[[Address, int], WeightSender]  # of a trainer's rank
    receiver: Callable[[Address, int], Receiver]  # of this index
    capability: str  # required of the backend, by its name in the spec
    one_device: bool = False  # both ends access the same device memory
    joins: bool = False  # both ends join a process group, meeting at the address
    # Ends the receivers' wait for a sender that has ended, where they do not notice that themselves; never raises.
    give_up: Callable[[Address], None] = lambda address: None


TRANSPORTS = {
    "ipc": Transport(sender=IpcSender, receiver=IpcReceiver, capability="update-ipc", one_device=True),
    "collective": Transport(
        sender=CollectiveSender, receiver=CollectiveReceiver, capability="update-collective", joins=True
    ),
    "disk": Transport(
        sender=lambda address, rank: DiskSender(address),
        receiver=DiskReceiver,
        capability="update-disk",
        give_up=give_up,
    ),
    # The same stream in other files.
    "delta": Transport(
        sender=lambda address, rank: DeltaSender(address),
        receiver=DeltaReceiver,
        capability="update-disk",
        give_up=give_up,
    ),
}


def transport_named(name: str) -> Transport:
    """Look up a transport. Raises ConfigError, listing the known ones, if there is none of this name."""
    if name not in TRANSPORTS:
        known = ", ".join(sorted(TRANSPORTS))
        raise ConfigError(f"unknown weight transport {name!r}; known: {known}{did_you_mean(name, TRANSPORTS)}")
    return TRANSPORTS[name]


def open_sender(address: Address, *, rank: int = 0) -> WeightSender:
    """The sender for the trainer's `rank`. It connects at the first `begin`; keep it for all updates, then close it."""
    return transport_named(address.transport).sender(address, rank)


def open_receiver(address: Address, *, index: int) -> Receiver:
    """The receiver `index`, of engine `address.engines[index]`. It connects at the first update; keep it for all."""
    return transport_named(address.transport).receiver(address, index)
