"""What is known of a run's devices before it starts; and what is on shared ones at each stage of a step, as data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum

import torch
from attrs import field, frozen

from corerl.config.schema import ClusterConfig, Config
from corerl.errors import ConfigError
from corerl.kinds import ALL_KINDS, MemoryKind
from corerl.plugin.hooks import TRAINING_STATE
from corerl.plugin.spec import ACTOR

AMPERE = (8, 0)  # the first compute capability with bfloat16


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
ACTOR_WEIGHTS = "actor weights"  # which snapshots are made of
REST = "rest"  # nothing is resident, as at the start of a run: a starting engine finds room


def train_stage(role: str) -> str:
    """The name of the stage in which `role` takes its optimizer steps."""
    return f"train {role}"


def save_stage(role: str) -> str:
    """The name of the stage in which `role`'s part of a checkpoint is written, or copied for writing."""
    return f"save {role}"


def residency_stages(
    roles: Sequence[str],
    passed: Collection[str],
    frozen: Collection[str] = (),
) -> dict[str, Stage]:
    """The stages of a step by name, for the `roles` that share devices with engines; {} without such roles. Roles in
    `passed` run a forward pass before training; those that are `frozen` neither train nor save.

    Each stage holds only what it reads, to minimize its peak: roles train and save one after the other, and engines
    get memory for weights only once a rank holds nothing but its parameters.
    """
    if not roles:
        return {}
    trained = [role for role in roles if role not in frozen]
    return {
        COMPARE: Stage(ranks={ACTOR: frozenset({MemoryKind.PARAM})}),
        ACTOR_WEIGHTS: Stage(ranks={ACTOR: frozenset({MemoryKind.PARAM})}),
        FORWARD: Stage(ranks={role: frozenset({MemoryKind.PARAM}) for role in roles if role in passed}),
        TRAIN: Stage(),  # only for roles with devices of their own
        **{train_stage(role): Stage(ranks={role: ALL_KINDS}) for role in trained},
        UPDATE: Stage(engines=EngineMemory.WEIGHTS, ranks={ACTOR: frozenset({MemoryKind.PARAM})}),
        **{save_stage(role): Stage(engines=None, ranks={role: TRAINING_STATE}) for role in trained},
        SAMPLE: Stage(engines=EngineMemory.ALL),
        REST: Stage(),
    }


def offloaded(config: Config, device: str) -> tuple[str, ...]:
    """The roles that share devices with engines and take turns with them in device memory."""
    offload = config.cluster.offload
    separate = config.cluster.placement != "colocated" or not config.run.has_engines
    if separate or offload == "never" or (offload == "auto" and device != "cuda"):
        return ()
    return tuple(role for role in config.chosen_roles if role not in config.own_devices)


def resolve_device(device: str, *, address: str = "") -> str:
    """`auto` means cuda if torch sees a GPU on the driver's machine, whatever a cluster at `address` has.

    Raises ConfigError for `cuda` without a GPU; with a cluster at `address` it is not checked.
    """
    if device == "cuda" and address:
        return device
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("cluster.device: 'cuda', but torch sees no CUDA device here; use 'cpu' or 'auto'")
    return "cuda" if there and device != "cpu" else "cpu"


def has_bfloat16(cluster: ClusterConfig, device: str) -> bool:
    """Whether the GPUs of this machine compute in bfloat16; those of a cluster, which are not known yet, may."""
    if device != "cuda" or cluster.address:
        return True
    return all(torch.cuda.get_device_capability(index) >= AMPERE for index in range(torch.cuda.device_count()))


def against_taking_turns(config: Config, device: str) -> Iterator[str]:
    """Problems, one line each, of settings that conflict with ranks and engines taking turns in device memory."""
    if not offloaded(config, device):
        return
    if config.weights.every > 1 and config.run.trains:
        yield (
            f"weights.every: {config.weights.every}, but engines that share memory with the ranks in turns get new "
            "weights every step; set it to 1, or cluster.offload='never', or cluster.placement='disaggregated'"
        )
    if config.rollout.source != "synchronous" and config.run.mode == "train":
        yield (
            f"rollout.source: {config.rollout.source!r} samples while ranks train, but here engines and ranks take "
            "turns in memory; set cluster.placement='disaggregated', or rollout.source='synchronous', or, if both fit "
            "in memory, cluster.offload='never'"
        )
