"""Choose recomputation where a config leaves it open, by the memory that training is predicted to need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from attrs import evolve

from corerl.config.schema import Config
from corerl.config.toml_text import to_plain
from corerl.plan.plan import PlanReady
from corerl.plan.resolve import role_options
from corerl.plugin.capabilities import Capability

Choice: TypeAlias = Literal["none", "full"]


def chosen(plan: PlanReady, wanting: Collection[str]) -> dict[str, Choice]:
    """By trained role whose `recompute` is 'auto': 'full' if it is one of those `wanting` memory and its backend, as
    configured, can."""
    return {
        role: "full" if role in wanting and _can(plan, role) else "none"
        for role in plan.processes.roles
        if role in plan.algorithm.objectives and plan.asked.train_of(role).recompute == "auto"
    }


def settings_of(choices: Mapping[str, Choice], asked: Config) -> dict[str, Any]:
    """The settings that say so: roles that share [train] get a table of their own if they recompute and others do
    not."""
    own = {role: choice for role, choice in choices.items() if asked.chosen_roles[role].train is not None}
    settings: dict[str, Any] = {f"{asked.train_table_of(role)}.recompute": choice for role, choice in own.items()}
    shared = {role: choice for role, choice in choices.items() if role not in own}
    if len(set(shared.values())) == 1:
        settings["train.recompute"] = next(iter(shared.values()))
    elif shared:
        full = to_plain(evolve(asked.train, recompute="full"))
        settings |= {"train.recompute": "none"}
        settings |= {f"roles.{role}.train": full for role, choice in shared.items() if choice == "full"}
    return settings


def _can(plan: PlanReady, role: str) -> bool:
    own = plan.processes.roles[role]
    if own.cluster.train is None or not own.backend.spec.support(Capability.RECOMPUTE).full:
        return False
    cluster = evolve(own.cluster, train=evolve(own.cluster.train, recompute="full"))
    return not any(own.backend.spec.check(role_options(plan.config, role, own.backend), cluster))
