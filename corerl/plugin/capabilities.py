"""What a backend can do, as data: checked against the run before any device is taken."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from corerl.config.schema import TrainConfig


class Capability(StrEnum):
    CRITIC = "critic"  # a value head, and losses on values
    CPU = "cpu"  # runs without an accelerator
    MULTI_RANK = "multi-rank"  # more than one worker process
    SNAPSHOTS = "snapshots"  # a reference policy in host memory
    SAVE_BACKGROUND = "save-background"
    RESHARD = "reshard"  # resumes at another world size
    UPDATE_COLLECTIVE = "update-collective"
    UPDATE_DISK = "update-disk"
    UPDATE_IPC = "update-ipc"
    SLEEP = "sleep"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"  # with a loss scale
    RECOMPUTE = "recompute"  # activations, in the backward pass
    MOE = "moe"  # a model of several experts
    ROUTING_REPLAY = "routing-replay"  # tells the experts of each token, and trains through those that it is told


class Grade(StrEnum):
    FULL = "full"
    UNSUPPORTED = "unsupported"  # the library underneath cannot do it
    NOT_IMPLEMENTED = "not-implemented"  # it could, this backend does not yet


@frozen
class Support:
    grade: Grade
    reason: str = ""

    @property
    def full(self) -> bool:
        return self.grade is Grade.FULL


FULL = Support(Grade.FULL)
# What asks for a capability by its value: a precision. Every backend has float32.
PRECISIONS = {"bfloat16": Capability.BFLOAT16, "float16": Capability.FLOAT16}


def asked_by_role(role: str, train: TrainConfig, *, device: str, ranks: int, value_head: bool) -> dict[Capability, str]:
    """What a role's own settings ask of its backend, whatever the run does with it: each with the setting."""
    asked = {}
    if value_head:
        asked[Capability.CRITIC] = "roles.critic"
    if device == "cpu":
        asked[Capability.CPU] = "cluster.device = 'cpu'"
    if ranks > 1:
        asked[Capability.MULTI_RANK] = f"roles.{role}.ranks = {ranks}"
    if train.precision in PRECISIONS:
        asked[PRECISIONS[train.precision]] = f"train.precision = '{train.precision}'"
    if train.recompute != "none":
        asked[Capability.RECOMPUTE] = f"train.recompute = '{train.recompute}'"
    return asked


def unsupported(reason: str) -> Support:
    return Support(Grade.UNSUPPORTED, reason)


def not_implemented(reason: str) -> Support:
    return Support(Grade.NOT_IMPLEMENTED, reason)


def refusal(capability: Capability, support: Support, *, asked_by: str, backend: str) -> str:
    """Why `asked_by` cannot have it, for the user."""
    verb = "cannot do" if support.grade is Grade.UNSUPPORTED else "does not do yet"
    return (
        f"{asked_by} asks for {capability.value!r}, which the backend {backend!r} {verb}: "
        f"{support.reason or 'no reason given'}; change that setting, or choose another backend"
    )
