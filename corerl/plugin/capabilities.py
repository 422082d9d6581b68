"""What a backend can do, as data that is checked against the run before any device is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from corerl.config.schema import EXPERTS, LoraConfig, TrainConfig
from corerl.errors import Unsupported

if TYPE_CHECKING:
    from corerl.plugin.spec import BackendSpec


class Capability(StrEnum):
    """What a backend may be able to do; one that its spec does not name counts as present, except ABSENT ones."""

    CRITIC = "critic"  # a value head, and losses on values
    LORA = "lora"  # low-rank adapters in place of all weights
    EXPERT_LORA = "expert-lora"  # and of experts
    FROZEN = "frozen"  # roles that are never trained, without the memory of an optimizer
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
    RECOMPUTE = "recompute"  # recomputes activations in the backward pass
    MOE = "moe"  # mixture-of-experts models
    BUFFERS = "buffers"  # models with weights that no gradient trains, such as the biases of some routers
    WHOLE = "whole"  # passes padded rows through any causal language model of transformers, as its authors wrote it
    ROUTING_REPLAY = "routing-replay"  # reports each token's experts, and trains through the experts it is given
    AUX_LOSS = "aux-loss"  # adds the load-balancing loss of routers
    PICTURES = "pictures"  # passes a batch's pictures through the model's tower, and trains it if asked
    TARGETS = "targets"  # gives log-probs of the tokens in a batch's column `targets` where it has one
    SHARED_PREFIXES = (
        "shared-prefixes"  # computes what sequences begin with in common once, as `MicroBatch.shared` says
    )
    ADAM = "adam"  # takes a step with the settings of Adam and of clipping that `Step.adam` has


class Grade(StrEnum):
    FULL = "full"
    UNSUPPORTED = "unsupported"  # the library underneath cannot do it
    NOT_IMPLEMENTED = "not-implemented"  # the library could, this backend does not yet


@frozen
class Support:
    grade: Grade
    reason: str = ""

    @property
    def full(self) -> bool:
        return self.grade is Grade.FULL


FULL = Support(Grade.FULL)
# Capabilities whose setting a backend that does not know of them would ignore without a word.
ABSENT = dict.fromkeys(
    (
        *(Capability.AUX_LOSS, Capability.PICTURES, Capability.ADAM, Capability.TARGETS, Capability.SHARED_PREFIXES),
        Capability.EXPERT_LORA,
    ),
    Support(Grade.NOT_IMPLEMENTED, "its spec does not declare it"),
)


def support_in(declared: Mapping[Capability, Support], capability: Capability) -> Support:
    """The declared support for `capability`; FULL if none is declared, except for ABSENT ones."""
    return declared.get(capability) or ABSENT.get(capability, FULL)


def asked_by_role(
    role: str,
    train: TrainConfig,
    *,
    device: str,
    ranks: int,
    value_head: bool,
    frozen: bool = False,
    lora: LoraConfig | None = None,
    lora_table: str = "",
    pictures: str = "",
) -> dict[Capability, str]:
    """The capabilities that a role's own settings need, whatever the run does: capability -> the setting. `lora_table`
    is the one that asks for adapters, `pictures` the plugin that reads them."""
    settings = {
        Capability.FROZEN: frozen and f"roles.{role}",
        Capability.LORA: lora and lora_table,
        Capability.EXPERT_LORA: lora and lora.of_experts and f"the target {EXPERTS!r} of {lora_table}",
        Capability.PICTURES: pictures and f"model.pictures = '{pictures}'",
        Capability.CRITIC: value_head and "roles.critic",
        Capability.CPU: device == "cpu" and "cluster.device = 'cpu'",
        Capability.MULTI_RANK: ranks > 1 and f"roles.{role}.ranks = {ranks}",
        # Every backend has float32.
        Capability.BFLOAT16: train.precision == "bfloat16" and "train.precision = 'bfloat16'",
        Capability.FLOAT16: train.precision == "float16" and "train.precision = 'float16'",
        Capability.RECOMPUTE: train.recompute == "full" and "train.recompute = 'full'",
        Capability.WHOLE: train.layout == "whole" and "train.layout = 'whole'",
        Capability.SHARED_PREFIXES: train.share_prefixes and "train.share_prefixes = true",
        Capability.AUX_LOSS: not frozen and train.aux_loss_coef and f"train.aux_loss_coef = {train.aux_loss_coef:g}",
    }
    return {capability: str(setting) for capability, setting in settings.items() if setting}


def unsupported(reason: str) -> Support:
    """The library cannot do it."""
    return Support(Grade.UNSUPPORTED, reason)


def not_implemented(reason: str) -> Support:
    """The library could do it, but this backend does not."""
    return Support(Grade.NOT_IMPLEMENTED, reason)


def refusal(capability: Capability, support: Support, *, asked_by: str, backend: str) -> str:
    """The message that tells the user why `asked_by` cannot have `capability`."""
    when = "" if support.grade is Grade.UNSUPPORTED else " yet"
    return (
        f"{asked_by} requires {capability.value!r}, which the backend {backend!r} does not support{when}: "
        f"{support.reason or 'no reason given'}; change that setting, or choose another backend"
    )


def check_capabilities(spec: BackendSpec, needs: Mapping[Capability, str], *, name: str = "") -> None:
    """Check what a run needs of a backend (capability -> the setting that needs it) against what the spec declares.

    Raises Unsupported with one line for each missing capability. `name` is the backend's, for the message.
    """
    lines = []
    for capability, asked_by in needs.items():
        support = spec.support(capability)
        if not support.full:
            lines.append(refusal(capability, support, asked_by=asked_by, backend=name or spec.implementation))
    if lines:
        raise Unsupported("\n".join(lines))
