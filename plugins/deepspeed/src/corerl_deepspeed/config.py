"""The options of the DeepSpeed backend; options common to all backends are in [train]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Attribute, frozen

from corerl.config.schema import at_least, option

# Times 4 bytes, a multiple of 2 MiB: torch allocates exactly that much, so that no other tensor in the same block keeps
# it on the device when the bucket sleeps.
BUCKET = 3 * 2**24


def not_nvme(_: Any, attribute: Attribute[Any], value: str) -> None:
    if value == "nvme":
        raise ValueError(
            "'nvme' is not supported, since neither sleep nor a checkpoint would find masters, moments or weights in "
            "DeepSpeed's files; set 'optimizer' or 'parameters', which is host memory"
        )


@frozen(kw_only=True)
class DeepSpeedConfig:
    stage: Literal[1, 2, 3] = option(
        "what ZeRO shards over all ranks: 1 masters and moments, 2 gradients too, 3 parameters too", default=3
    )
    offload: Literal["none", "optimizer", "parameters", "nvme"] = option(
        "what stays in host memory: masters and moments, with the optimizer's step on the host; or parameters too, of "
        "which each module's are copied to the device when it is its turn (stage 3); nvme is refused with the reason",
        default="none",
        validator=not_nvme,
    )
    node_shard_size: int = option(
        "ranks, those of one node, that hold a second copy of the parameters between them, so that backward passes "
        "gather inside the node (ZeRO++ hpZ, stage 3); 1 makes no second copy",
        default=1,
        validator=at_least(1),
    )
    reduce_bucket: int = option(
        "elements of gradients that are reduced together; no more memory is taken than the model has parameters",
        default=BUCKET,
        validator=at_least(1),
    )
    gather_bucket: int = option(
        "elements of parameters that are gathered together: ahead of their turn in stage 3, after a step in 1 and 2",
        default=BUCKET,
        validator=at_least(2),
    )
    native_checkpoint: bool = option(
        "write DeepSpeed's own checkpoint too, as `deepspeed` in the role's directory of each checkpoint; training "
        "waits until it is written, and CoreRL resumes from its own",
        default=False,
    )
    raw: Mapping[str, Any] = option(
        "more of DeepSpeed's own configuration, as its JSON has it, with tables inside: {zero_optimization = "
        "{overlap_comm = false}}; what [train] or the options above say is refused, and what DeepSpeed does not know",
        factory=dict,
    )
