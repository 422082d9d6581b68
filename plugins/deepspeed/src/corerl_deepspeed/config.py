"""The options of the DeepSpeed backend; options common to all backends are in [train]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Attribute, frozen

from corerl.config import at_least, option

# Times 4 bytes, a multiple of 2 MiB: torch allocates exactly that much, so that no other tensor in the same block keeps
# it on the device when the bucket sleeps.
BUCKET = 3 * 2**24


def not_nvme(_: Any, attribute: Attribute[Any], value: str) -> None:
    if value == "nvme":
        raise ValueError(
            "'nvme' is not supported, since sleep and checkpoints cannot reach masters, moments or weights in "
            "DeepSpeed's files; set 'optimizer' or 'parameters' to offload to host memory"
        )


@frozen(kw_only=True)
class DeepSpeedConfig:
    stage: Literal[1, 2, 3] = option(
        "what ZeRO shards over all ranks: 1 float32 master weights and moments, 2 also gradients, 3 also parameters",
        default=3,
    )
    offload: Literal["none", "optimizer", "parameters", "nvme"] = option(
        "what to keep in host memory; optimizer: master weights and moments, with the optimizer step on the host; "
        "parameters: also parameters, copied to the device one module at a time (stage 3); nvme is not supported",
        default="none",
        validator=not_nvme,
    )
    node_shard_size: int = option(
        "ranks, usually those of one node, that together hold a second copy of the parameters, so backward passes "
        "gather within the node (ZeRO++ hpZ, stage 3); 1 makes no second copy",
        default=1,
        validator=at_least(1),
    )
    reduce_bucket: int = option(
        "gradient elements to reduce at once; the buffer never exceeds the size of the model",
        default=BUCKET,
        validator=at_least(1),
    )
    gather_bucket: int = option(
        "parameter elements to gather at once: prefetched in stage 3, after each step in stages 1 and 2",
        default=BUCKET,
        validator=at_least(2),
    )
    raw: Mapping[str, Any] = option(
        "further DeepSpeed configuration, nested as in its JSON: {zero_optimization = {overlap_comm = false}}; "
        "settings that [train] or the options above control are rejected, as are unknown ones",
        factory=dict,
    )
