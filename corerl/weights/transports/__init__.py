"""The ways that buckets travel, by the name that stands in the address."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TypeAlias, TypeVar

from corerl.errors import ConfigError
from corerl.weights.transport import Address, WeightReceiver, WeightSender
from corerl.weights.transports.collective import CollectiveReceiver, CollectiveSender
from corerl.weights.transports.disk import DiskReceiver, DiskSender

T = TypeVar("T")
SenderFactory: TypeAlias = Callable[[Address], WeightSender]
ReceiverFactory: TypeAlias = Callable[[Address, int], WeightReceiver]

SENDERS: dict[str, SenderFactory] = {"collective": CollectiveSender, "disk": DiskSender}
RECEIVERS: dict[str, ReceiverFactory] = {"collective": CollectiveReceiver, "disk": DiskReceiver}


def require_transport(transport: str) -> None:
    """Raises ConfigError, with the known ones, where there is no transport of this name."""
    _look_up(SENDERS, transport)


def open_sender(address: Address) -> WeightSender:
    """The trainer's end. Nothing is connected before the first `begin`; keep it for all updates, then `close` it."""
    return _look_up(SENDERS, address.transport)(address)


def open_receiver(address: Address, *, index: int) -> WeightReceiver:
    """The end of engine `address.engines[index]`. Nothing is connected before the first update; keep it for all."""
    return _look_up(RECEIVERS, address.transport)(address, index)


def _look_up(table: dict[str, T], transport: str) -> T:
    if transport not in table:
        near = get_close_matches(transport, table, n=1)
        raise ConfigError(
            f"unknown weight transport {transport!r}; known: {', '.join(sorted(table))}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return table[transport]
