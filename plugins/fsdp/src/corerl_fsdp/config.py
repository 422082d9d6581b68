"""The options of the FSDP backend; options common to all backends are in [train]."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config import at_least, option


@frozen(kw_only=True)
class FsdpConfig:
    reshard_after_forward: bool = option(
        "free a layer's gathered weights after its forward pass and gather them again for backward: less memory, one "
        "more all-gather per layer",
        default=True,
    )
    shard_size: int = option(
        "ranks over which one copy of weights, gradients and moments is sharded; groups of this size are replicas "
        "that all-reduce gradients once per step (HSDP); 0 shards over all ranks",
        default=0,
        validator=at_least(0),
    )
    sync: Literal["every", "last"] = option(
        "micro-batches after which gradients are reduced: every one; or only the last, with fewer transfers but a "
        "full float32 gradient on each rank",
        default="every",
    )
    offload: Literal["none", "optimizer", "parameters"] = option(
        "what to keep in host memory; optimizer: moments, with the optimizer step on the host; parameters: also "
        "parameters, copied to the device one layer at a time",
        default="none",
    )
    compile: bool | Literal["auto"] = option(
        "run decoder layers through torch.compile, once for all micro-batch lengths; needs a C++ compiler (Triton and "
        "a C compiler on a GPU), and about 25 s at the first passes, 4 once compile_cache has the kernels. auto: on "
        "GPUs, in half precision, if the model's attention is one kernel there and what this needs is installed",
        default="auto",
    )
    compile_cache: str = option(
        "folder on each node where compiled layers are kept for later runs; the variable TORCHINDUCTOR_CACHE_DIR goes "
        "before it, and empty leaves them where torch does, in /tmp",
        default="~/.cache/corerl/compiled",
    )
