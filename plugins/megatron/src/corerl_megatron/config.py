"""The options of the Megatron backend; options common to all backends are in [train]."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config.schema import at_least, option


@frozen(kw_only=True)
class MegatronConfig:
    tensor_parallel: int = option(
        "ranks that each matrix is split over; they exchange activations in every layer, so keep them on one node",
        default=1,
        validator=at_least(1),
    )
    pipeline_parallel: int = option(
        "stages that the layers are split into; micro-batches pass through them one after another",
        default=1,
        validator=at_least(1),
    )
    virtual_pipeline: int = option(
        "parts that each stage's layers are split into, interleaved (Narayanan et al. 2021): less idle time, more "
        "transfers; 1 does not interleave",
        default=1,
        validator=at_least(1),
    )
    context_parallel: int = option(
        "ranks that the tokens of each sequence are split over, for sequences that do not fit one rank",
        default=1,
        validator=at_least(1),
    )
    expert_parallel: int = option(
        "ranks that the experts of a layer are split over; taken out of the data-parallel and context-parallel ranks",
        default=1,
        validator=at_least(1),
    )
    expert_tensor_parallel: int = option(
        "ranks that each expert's matrices are split over; 0 takes tensor_parallel", default=0, validator=at_least(0)
    )
    sequence_parallel: bool = option(
        "split the activations between tensor-parallel regions over tokens too: less memory at the same traffic "
        "(Korthikanti et al. 2022); a model of experts needs it where tensor_parallel > 1",
        default=False,
    )
    distributed_optimizer: bool = option(
        "split float32 masters and moments over the data-parallel ranks (ZeRO-1)", default=True
    )
    overlap_grad_reduce: bool = option("reduce gradients while the backward pass goes on", default=False)
    overlap_param_gather: bool = option(
        "gather the parameters that the optimizer has stepped while the next forward pass goes on; needs "
        "distributed_optimizer and overlap_grad_reduce",
        default=False,
    )
    bucket: int = option(
        "elements that travel together where gradients or parameters do so beside computation; 0 leaves it to "
        "megatron-core, which takes 40 million, or a million for each data-parallel rank where that is more",
        default=0,
        validator=at_least(0),
    )
    recompute: Literal["full", "mlp"] = option(
        "what train.recompute='full' means here: whole layers, or their MLPs and experts, and no attention, which "
        "costs most where sequences are long; without it this and the next two say nothing",
        default="full",
    )
    recompute_method: Literal["uniform", "block"] = option(
        "whole layers: groups of recompute_layers each, of which the first input is kept; or the first "
        "recompute_layers of each stage, or of each of its interleaved parts, the others not at all",
        default="uniform",
    )
    recompute_layers: int = option("see recompute_method", default=1, validator=at_least(1))
    transformer: Literal["auto", "torch", "transformer_engine"] = option(
        "what layers are made of: plain torch, or TransformerEngine; auto takes TransformerEngine where it is "
        "installed and the device is a GPU, but for context parallelism in float32, which it has no kernel for",
        default="auto",
    )
    fp8: Literal["none", "e4m3", "hybrid"] = option(
        "multiply matrices in 8 bits: e4m3 throughout, or hybrid, with e5m2 for gradients; needs TransformerEngine",
        default="none",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = option(
        "where fp8 is on, how its scales are found: from earlier steps, for each tensor, for each block of a tensor",
        default="blockwise",
    )
    aux_loss_coef: float = option(
        "weight of the loss that balances the load of experts (Fedus et al. 2021, eq. 4); 0 leaves it out",
        default=0.0,
        validator=at_least(0),
    )
    native_checkpoint: bool = option(
        "write megatron-core's own distributed checkpoint too, as `megatron` in the role's directory of each "
        "checkpoint; training waits until it is written, and CoreRL resumes from its own",
        default=False,
    )
    nvls: bool = option(
        "let NCCL use NVLink multicast (NVLS); off where a container or a driver does not allow it", default=True
    )


def too_precise(config: MegatronConfig, precision: str) -> bool:
    """Whether TransformerEngine (2.20) lacks attention for it: its context parallelism only works in 16 bits."""
    return config.context_parallel > 1 and precision == "float32"
