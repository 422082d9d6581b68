"""Choose how weights reach the engines: as configured, or by where ranks and engines are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from corerl.cluster.arrangement import Placement
from corerl.config.schema import Config
from corerl.errors import ConfigError
from corerl.plan.resolve import backend_name
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import Kind, load
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import AUTO, transport_named

ENGINES = "engines"  # name of the group of engine processes, next to the roles' names


def senders(receivers: Sequence[int], ranks: Sequence[int], *, one_machine: bool) -> tuple[int, ...]:
    """For each receiver, the actor's rank that can share memory with it: the one on its bundle. `receivers` and `ranks`
    are bundle indices. On the CPUs of `one_machine` it is rank 0 for all. Empty if any receiver has none.
    """
    if one_machine:
        return (0,) * len(receivers)
    at = {bundle: rank for rank, bundle in enumerate(ranks)}
    return tuple(at[bundle] for bundle in receivers) if all(bundle in at for bundle in receivers) else ()


def choose_transport(
    config: Config, places: Mapping[str, Sequence[int]], senders: Sequence[int], *, by_handle: bool
) -> str:
    """The name of the transport. `by_handle`: whether the actor's backend can share memory by handle.

    Raises ConfigError if one within a device is configured, as 'ipc' is, and an engine is on a device without a rank.
    """
    transport = config.weights.transport
    if transport == AUTO:
        return "ipc" if by_handle and senders and config.cluster.placement == "colocated" else "collective"
    if transport_named(transport).one_device and config.run.samples and not senders:
        raise ConfigError(
            f"weights.transport: {transport!r} shares memory within one device, but an engine is on a device without "
            f"{ACTOR} ranks (they have the bundles {list(places[ACTOR])}); use 'auto', or colocated engines, at most "
            "one per rank"
        )
    return transport


def transport_of(config: Config, placement: Placement, device: str) -> tuple[str, tuple[int, ...]]:
    """The transport, and for each receiver the actor's rank on its device (see `ProcessPlan.senders`)."""
    one_machine = device == "cpu" and not config.cluster.address
    places = placement.places
    receivers = [bundle for place in places.get(ENGINES, ()) for bundle in placement.taken(ENGINES, place)]
    sending = senders(receivers, places[ACTOR], one_machine=one_machine)
    support = load(Kind.BACKENDS, backend_name(config, ACTOR)).spec.support(Capability.UPDATE_IPC)
    return choose_transport(config, places, sending, by_handle=support.full), sending
