"""The options of the FSDP backend; options common to all backends are in [train]."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config.schema import at_least, option


@frozen(kw_only=True)
class FsdpConfig:
    reshard_after_forward: bool = option(
        "free a layer's gathered weights after its forward pass and gather them again for backward: less memory, "
        "one more all-gather a layer",
        default=True,
    )
    shard_size: int = option(
        "ranks that one copy of weights, gradients and moments is sharded over; groups of so many ranks are replicas "
        "of each other, which exchange gradients once a step (HSDP); 0 takes all ranks",
        default=0,
        validator=at_least(0),
    )
    sync: Literal["every", "last"] = option(
        "the micro-batches after which gradients are reduced: every one; or the last one alone, with fewer transfers "
        "and a whole float32 gradient on each rank",
        default="every",
    )
    offload: Literal["none", "optimizer", "parameters"] = option(
        "what stays in host memory: moments, with the optimizer's step on the host; or parameters too, of which each "
        "layer's are copied to the device when it is its turn",
        default="none",
    )
    compile: bool = option(
        "decoder layers through torch.compile, for any length of micro-batch; a C++ compiler (Triton on a GPU) is "
        "needed, and minutes at the start",
        default=False,
    )
