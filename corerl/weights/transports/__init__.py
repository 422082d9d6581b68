"""The ways that buckets travel, by the name that stands in the address."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from corerl.errors import ConfigError
from corerl.messages import did_you_mean
from corerl.weights.transport import Address, WeightReceiver, WeightSender
from corerl.weights.transports.collective import CollectiveReceiver, CollectiveSender
from corerl.weights.transports.delta import DeltaReceiver, DeltaSender
from corerl.weights.transports.disk import DiskReceiver, DiskSender
from corerl.weights.transports.ipc import IpcReceiver, IpcSender

T = TypeVar("T")
SenderFactory: TypeAlias = Callable[[Address, int], WeightSender]
ReceiverFactory: TypeAlias = Callable[[Address, int], WeightReceiver]

AUTO = "auto"  # in a config: ipc where the engines are on the ranks' devices, else collective

SENDERS: dict[str, SenderFactory] = {
    "ipc": IpcSender,
    "collective": CollectiveSender,
    "disk": lambda address, rank: DiskSender(address),
    "delta": lambda address, rank: DeltaSender(address),
}
RECEIVERS: dict[str, ReceiverFactory] = {
    "ipc": IpcReceiver,
    "collective": CollectiveReceiver,
    "disk": DiskReceiver,
    "delta": DeltaReceiver,
}


def require_transport(transport: str) -> None:
    """Raises ConfigError, with the known ones, where there is no transport of this name."""
    if transport != AUTO:
        _look_up(SENDERS, transport)


def open_sender(address: Address, *, rank: int = 0) -> WeightSender:
    """The end of the trainer's `rank`. Nothing is connected before the first `begin`; keep it for all updates, then
    `close` it."""
    return _look_up(SENDERS, address.transport)(address, rank)


def open_receiver(address: Address, *, index: int) -> WeightReceiver:
    """The end of engine `address.engines[index]`. Nothing is connected before the first update; keep it for all."""
    return _look_up(RECEIVERS, address.transport)(address, index)


def _look_up(table: dict[str, T], transport: str) -> T:
    if transport not in table:
        raise ConfigError(
            f"unknown weight transport {transport!r}; known: {', '.join(sorted(table))}{did_you_mean(transport, table)}"
        )
    return table[transport]
