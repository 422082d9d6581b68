"""How a run's weights reach its engines: what the config says, or what follows from where ranks and engines are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from corerl.config.schema import Config
from corerl.errors import ConfigError
from corerl.trainer.assign import ACTOR
from corerl.weights.transports import AUTO


def senders(receivers: Sequence[int], ranks: Sequence[int], *, one_machine: bool) -> tuple[int, ...]:
    """Of each receiver, the actor's rank that can hand it memory: the one on its bundle, `receivers` and `ranks` being
    the bundles of each. On CPUs of `one_machine` that is the first rank for all. Empty where a receiver has none.
    """
    if one_machine:
        return (0,) * len(receivers)
    at = {bundle: rank for rank, bundle in enumerate(ranks)}
    return tuple(at[bundle] for bundle in receivers) if all(bundle in at for bundle in receivers) else ()


def choose_transport(
    config: Config, places: Mapping[str, Sequence[int]], senders: Sequence[int], *, by_handle: bool
) -> str:
    """The name of a transport. `by_handle`: whether the actor's backend can hand over memory.

    Raises ConfigError where that is asked for, and an engine is on a device without a rank.
    """
    transport = config.weights.transport
    if transport == AUTO:
        return "ipc" if by_handle and senders and config.cluster.placement == "colocated" else "collective"
    if transport == "ipc" and config.run.samples and not senders:
        raise ConfigError(
            "weights.transport: 'ipc' hands over memory within one device, and an engine is on one that no rank of "
            f"the {ACTOR} is on (its ranks have the bundles {list(places[ACTOR])}); take 'auto', or colocated engines, "
            "no more than ranks"
        )
    return transport
