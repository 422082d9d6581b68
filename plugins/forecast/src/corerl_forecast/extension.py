"""Predict what the devices of a run on GPUs will hold; refuse what cannot fit, recompute layers where training would
not fit without, and list slow paths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from attrs import evolve

from corerl.config import ClusterInfo, Config
from corerl.models import size_of
from corerl.plan import PlanReady, place_of, role_options
from corerl.plugin import Capability, PlanAnswer, SlowPath

Choice: TypeAlias = Literal["none", "full"]
# Of whole steps on an H100: docs/models.md has the table of all.
FLOAT32 = "a step takes twice as long"


class Forecasting:
    def __init__(self, *, options: Any, run_dir: str) -> None:
        pass

    def plan_ready(self, plan: PlanReady) -> PlanAnswer | None:
        if plan.processes.device != "cuda" or not plan.config.run.trains:
            return None
        from corerl_forecast.forecast import Forecaster  # only on GPUs: imports the models that transformers has

        forecaster = Forecaster(plan)
        memory, there = forecaster.forecast(), device_memory(plan.config)
        choices = chosen(plan, {role for role in plan.processes.roles if memory.tight(role, there=there)})
        settings = settings_of(choices, plan.asked)
        lines = [
            f"{plan.asked.train_table_of(role)}.recompute: 'auto' is {choice!r} for the {role}"
            for role, choice in choices.items()
        ]
        if "full" in choices.values():  # what is predicted of that plan follows when it is made
            return PlanAnswer(settings=settings, notices=lines)
        return PlanAnswer(
            settings=settings,
            notices=[*lines, *slow_paths(plan), *memory.lines(fullest=plan.starting)],
            problems=list(forecaster.too_large(memory, there=there)) if there else (),
        )


def device_memory(config: Config) -> int:
    """Bytes of this machine's smallest GPU; 0 for a cluster, whose devices are not known yet."""
    if config.cluster.address:
        return 0
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


# ---- recomputation ---------------------------------------------------------------------------------------------------


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
        full = evolve(asked.train, recompute="full")
        settings |= {"train.recompute": "none"}
        settings |= {f"roles.{role}.train": full for role, choice in shared.items() if choice == "full"}
    return settings


def _can(plan: PlanReady, role: str) -> bool:
    own = plan.processes.roles[role]
    if own.cluster.train is None or not own.backend.spec.support(Capability.RECOMPUTE).full:
        return False
    cluster = evolve(own.cluster, train=evolve(own.cluster.train, recompute="full"))
    return not any(own.backend.spec.check(role_options(plan.config, role, own.backend), cluster))


# ---- slow paths ------------------------------------------------------------------------------------------------------


def slow_paths(plan: PlanReady) -> list[str]:
    """One line for each slow path of a role, with its price and what avoids it."""
    lines = []
    for role, own in plan.processes.roles.items():
        found = [
            *slow_precision(own.cluster, asked=plan.asked.train_of(role).precision == "float32"),
            *own.backend.spec.slow(
                role_options(plan.config, role, own.backend), own.cluster, size_of(plan.models[role].built)
            ),
        ]
        for each in found:
            place = place_of(each, own.backend, config=plan.config, role=role)
            lines.append(f"{place}: {each.text}; {each.price}; {each.instead}")
    return list(dict.fromkeys(lines))


def slow_precision(cluster: ClusterInfo, *, asked: bool) -> Iterator[SlowPath]:
    """What float32 costs on GPUs. Unless it was `asked` for, nothing better is there."""
    if cluster.train is not None and cluster.train.precision == "float32":
        yield SlowPath(
            path=".train.precision",
            text="float32 has neither a kernel for packed attention nor the fast matrix products of half precision",
            price=FLOAT32,
            instead="set it to 'bfloat16'" if asked else "bfloat16, which the GPU or the backend lacks, would avoid it",
        )
