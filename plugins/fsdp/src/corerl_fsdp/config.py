"""The options of the FSDP backend; options common to all backends are in [train]."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config import at_least, option

KEPT = 4 * 2**30  # bytes of gathered weights, as of 2 B parameters in half precision; chosen, not measured


@frozen(kw_only=True)
class FsdpConfig:
    reshard_after_forward: bool | Literal["auto"] = option(
        "true: free a layer's gathered weights after each pass, and gather them again for the next; false: keep all "
        "gathered until the step's last backward pass, with a copy of the model in the passes' precision as its price. "
        "auto: keep them where that copy has at most 4 GiB, and parameters are not offloaded",
        default="auto",
    )
    shard_size: int = option(
        "ranks over which one copy of weights, gradients and moments is sharded; groups of this size are replicas "
        "that all-reduce gradients once per step (HSDP); 0 shards over all ranks",
        default=0,
        validator=at_least(0),
    )
    sync: Literal["auto", "every", "last"] = option(
        "micro-batches after which gradients are reduced: every one; or only the last, with fewer transfers but a "
        "full float32 gradient on each rank. auto: the last where a shard is one rank's, which has all of it anyway, "
        "unless it is offloaded with the parameters, or an earlier call of one rank's step has left gradients",
        default="auto",
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

    def keeps_gathered(self, elements: int, itemsize: int) -> bool:
        """Whether weights of so many elements, each of `itemsize` bytes in the passes, stay gathered for a step."""
        if self.reshard_after_forward != "auto":
            return not self.reshard_after_forward
        return self.offload != "parameters" and elements * itemsize <= KEPT

    def reduces_once(self, ranks: int, *, adds: bool = False) -> bool:
        """Whether gradients of all micro-batches are added up on each rank before they are reduced over `ranks`.
        `adds`: an earlier call of the step has left reduced gradients, besides which one rank's others would take as
        much memory again. Replicas take that anyway, since theirs wait for the all-reduce of the last micro-batch."""
        if self.sync != "auto":
            return self.sync == "last"
        return self.offload != "parameters" and (self.shard_size or ranks) == 1 and not (adds and ranks == 1)
