"""Settle what `[train]` leaves open: the precision by the device, and recomputation by the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve

from corerl.config.schema import Config, TrainConfig
from corerl.plugin.capabilities import Capability
from corerl.plugin.options import backend_name
from corerl.plugin.registry import Kind, load


def with_precisions(config: Config, device: str, *, bfloat16: bool) -> Config:
    """The config with a precision for every role in place of 'auto', for devices with or without `bfloat16`."""
    trains = {}
    for role in config.chosen_roles:
        train = config.train_of(role)
        half = bfloat16 and supports(config, role, Capability.BFLOAT16)
        trains[role] = evolve(train, precision=train.settled(device, bfloat16=half).precision)
    return with_trains(config, trains)


def with_recomputation(config: Config, wanting: Mapping[str, bool]) -> Config:
    """The config with 'full' or 'none' in place of 'auto': the former for roles that are `wanting` memory, if their
    backends can."""
    trains = {}
    for role in config.chosen_roles:
        train = config.train_of(role)
        full = wanting.get(role, False) and supports(config, role, Capability.RECOMPUTE)
        if train.recompute == "auto":
            train = evolve(train, recompute="full" if full else "none")
        trains[role] = train
    return with_trains(config, trains)


def supports(config: Config, role: str, capability: Capability) -> bool:
    return bool(load(Kind.BACKENDS, backend_name(config, role)).spec.support(capability).full)


def with_trains(config: Config, trains: Mapping[str, TrainConfig]) -> Config:
    """The config with these training settings of all its roles, in their tables; roles that share one in which they
    now differ get tables of their own."""
    shared = {role: train for role, train in trains.items() if config.chosen_roles[role].train is None}
    if len(set(map(repr, shared.values()))) == 1:
        config = evolve(config, train=next(iter(shared.values())))
    else:
        shared = {}
    own: dict[str, Any] = {
        role: evolve(config.chosen_roles[role], train=trains[role]) for role in trains if role not in shared
    }
    return evolve(config, roles=evolve(config.roles, **own)) if own else config


def told(before: Config, after: Config) -> Iterator[str]:
    """A line for each setting that was settled."""
    for role in before.chosen_roles:
        table, was, now = before.train_table_of(role), before.train_of(role), after.train_of(role)
        for name in ("precision", "recompute") if before.run.trains else ("precision",):
            if getattr(was, name) == "auto":
                yield f"{table}.{name}: 'auto' is {getattr(now, name)!r} for the {role}"
