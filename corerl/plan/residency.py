"""Define what is on shared devices at each stage of a step, as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

from attrs import evolve, field, frozen

from corerl.kinds import ALL_KINDS, MemoryKind
from corerl.plugin.hookspecs import STATE
from corerl.plugin.spec import ACTOR


class EngineMemory(IntEnum):
    """What engines hold in device memory."""

    NOTHING = 0
    WEIGHTS = 1
    ALL = 2  # caches too, which the first request allocates


@frozen(kw_only=True)
class Stage:
    """What engines and roles hold during one stage; a role that is not named holds nothing."""

    engines: EngineMemory | None = EngineMemory.NOTHING  # None: unchanged
    ranks: Mapping[str, frozenset[MemoryKind]] = field(factory=dict)  # by role


SAMPLE, COMPARE, FORWARD, TRAIN, UPDATE = "sample", "compare", "forward", "train", "update"
REST = "rest"  # nothing is resident, as at the start of a run: a starting engine finds room


def training(role: str) -> str:
    """The name of the stage in which `role` takes its optimizer steps."""
    return f"train {role}"


def saving(role: str) -> str:
    """The name of the stage in which `role`'s part of a checkpoint is written, or copied for writing."""
    return f"save {role}"


def residency_plan(
    roles: Sequence[str],
    passed: Collection[str],
    frozen: Collection[str] = (),
    sleeps: Collection[MemoryKind] = ALL_KINDS,
) -> dict[str, Stage]:
    """The stages of a step by name, for the `roles` that share devices with engines; {} if there are none. Roles in
    `passed` run a forward pass before training; those that are `frozen` neither train nor save. Of their memory only
    the kinds in `sleeps` ever leave the device.

    Each stage holds only what it reads, to minimize its peak: roles train and save one after the other, and engines
    get memory for weights only once a rank holds nothing but its parameters, and what never leaves.
    """
    if not roles:
        return {}
    trained = [role for role in roles if role not in frozen]
    stages = {
        COMPARE: Stage(ranks={ACTOR: frozenset({MemoryKind.PARAM})}),
        FORWARD: Stage(ranks={role: frozenset({MemoryKind.PARAM}) for role in roles if role in passed}),
        TRAIN: Stage(),  # only for roles with devices of their own
        **{training(role): Stage(ranks={role: ALL_KINDS}) for role in trained},
        UPDATE: Stage(engines=EngineMemory.WEIGHTS, ranks={ACTOR: frozenset({MemoryKind.PARAM})}),
        **{saving(role): Stage(engines=None, ranks={role: STATE}) for role in trained},
        SAMPLE: Stage(engines=EngineMemory.ALL),
        REST: Stage(),
    }
    if stays := ALL_KINDS - frozenset(sleeps):
        for name, stage in stages.items():
            ranks = {role: stage.ranks.get(role, frozenset()) | stays for role in roles}
            stages[name] = evolve(stage, ranks=ranks)
    return stages
