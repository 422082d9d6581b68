"""The ways that buckets travel, by the name that stands in the address."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from corerl.errors import ConfigError
from corerl.messages import did_you_mean
from corerl.weights.transport import Address, WeightReceiver, WeightSender
from corerl.weights.transports.collective import CollectiveReceiver, CollectiveSender
from corerl.weights.transports.delta import DeltaReceiver, DeltaSender
from corerl.weights.transports.disk import DiskReceiver, DiskSender
from corerl.weights.transports.ipc import IpcReceiver, IpcSender

SenderFactory: TypeAlias = Callable[[Address, int], WeightSender]
ReceiverFactory: TypeAlias = Callable[[Address, int], WeightReceiver]

AUTO = "auto"  # in a config: ipc where the engines are on the ranks' devices, else collective


@frozen(kw_only=True)
class Transport:
    """A way that buckets travel, and what a run that takes it has to know."""

    sender: SenderFactory
    receiver: ReceiverFactory
    capability: str  # that a backend must have for it, as its spec calls it
    one_device: bool = False  # both ends read the same memory of a device
    joins: bool = False  # both ends are in a process group, which they meet for at the address


TRANSPORTS = {
    "ipc": Transport(sender=IpcSender, receiver=IpcReceiver, capability="update-ipc", one_device=True),
    "collective": Transport(
        sender=CollectiveSender, receiver=CollectiveReceiver, capability="update-collective", joins=True
    ),
    "disk": Transport(
        sender=lambda address, rank: DiskSender(address), receiver=DiskReceiver, capability="update-disk"
    ),
    # The same stream, and other files.
    "delta": Transport(
        sender=lambda address, rank: DeltaSender(address), receiver=DeltaReceiver, capability="update-disk"
    ),
}


def transport_named(name: str) -> Transport:
    """Raises ConfigError, with the known ones, where there is none of this name."""
    if name not in TRANSPORTS:
        known = ", ".join(sorted(TRANSPORTS))
        raise ConfigError(f"unknown weight transport {name!r}; known: {known}{did_you_mean(name, TRANSPORTS)}")
    return TRANSPORTS[name]


def open_sender(address: Address, *, rank: int = 0) -> WeightSender:
    """The end of the trainer's `rank`. Nothing is connected before the first `begin`; keep it for all updates, then
    `close` it."""
    return transport_named(address.transport).sender(address, rank)


def open_receiver(address: Address, *, index: int) -> WeightReceiver:
    """The end of engine `address.engines[index]`. Nothing is connected before the first update; keep it for all."""
    return transport_named(address.transport).receiver(address, index)
