"""Weight transports by name, and the two ends that an `Address` connects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corerl.plugin.registry import Kind, load, load_implementation
from corerl.plugin.spec import TransportSpec

if TYPE_CHECKING:
    from corerl.weights.transport import Address, Receiver, WeightSender

AUTO = "auto"  # in a config: ipc if engines are on the ranks' devices, otherwise collective


def transport_named(name: str) -> TransportSpec:
    """The spec of a transport. Raises PluginError if it cannot be loaded."""
    spec: TransportSpec = load(Kind.TRANSPORTS, name).spec
    return spec


def open_sender(address: Address, *, rank: int = 0, lost: Mapping[str, str] | None = None) -> WeightSender:
    """The sender for the trainer's `rank`. It connects at the first `open`; keep it for all updates, then close it.
    Engines that fail get an entry in `lost` (engine -> why), and are waited for no more."""
    sender: WeightSender = _end(address, "sender")(address, rank, lost)
    return sender


def open_receiver(address: Address, *, index: int) -> Receiver:
    """The receiver `index`, of engine `address.engines[index]`. It connects at the first update; keep it for all."""
    receiver: Receiver = _end(address, "receiver")(address, index)
    return receiver


def abandon(address: Address) -> None:
    """End the receivers' wait for a sender that has failed or ended, where they do not notice that themselves."""
    if transport_named(address.transport).abandon:
        _end(address, "abandon")(address)


def _end(address: Address, name: str) -> Any:
    """What the spec of the address's transport names so."""
    loaded = load(Kind.TRANSPORTS, address.transport)
    return load_implementation(Kind.TRANSPORTS, loaded, getattr(loaded.spec, name))
