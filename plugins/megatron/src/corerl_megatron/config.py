"""The options of the Megatron backend; options common to all backends are in [train]."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from corerl.config import at_least, option


@frozen(kw_only=True)
class MegatronConfig:
    tensor_parallel: int = option(
        "ranks over which each matrix is split; they exchange activations in every layer, so keep them on one node",
        default=1,
        validator=at_least(1),
    )
    pipeline_parallel: int = option(
        "pipeline stages into which the layers are split; micro-batches pass through them in turn",
        default=1,
        validator=at_least(1),
    )
    virtual_pipeline: int = option(
        "interleaved parts into which each stage's layers are split (Narayanan et al. 2021): less idle time, more "
        "transfers; 1 does not interleave",
        default=1,
        validator=at_least(1),
    )
    context_parallel: int = option(
        "ranks over which the tokens of each sequence are split, for sequences that do not fit on one rank",
        default=1,
        validator=at_least(1),
    )
    expert_parallel: int = option(
        "ranks over which the experts of a layer are split; taken from the data-parallel and context-parallel ranks",
        default=1,
        validator=at_least(1),
    )
    expert_tensor_parallel: int = option(
        "ranks over which each expert's matrices are split; 0 uses tensor_parallel", default=0, validator=at_least(0)
    )
    sequence_parallel: bool = option(
        "also split the activations between tensor-parallel regions, by tokens: less memory at the same traffic "
        "(Korthikanti et al. 2022); required for MoE models with tensor_parallel > 1",
        default=False,
    )
    distributed_optimizer: bool = option(
        "shard float32 master weights and moments over the data-parallel ranks (ZeRO-1)", default=True
    )
    overlap_grad_reduce: bool = option("reduce gradients during the backward pass", default=False)
    overlap_param_gather: bool = option(
        "gather the updated parameters during the next forward pass; needs distributed_optimizer and "
        "overlap_grad_reduce",
        default=False,
    )
    bucket: int = option(
        "elements per transfer when gradients or parameters are communicated during computation; 0 leaves it to "
        "megatron-core: the larger of 40 million and a million per data-parallel rank",
        default=0,
        validator=at_least(0),
    )
    recompute: Literal["full", "mlp"] = option(
        "what train.recompute='full' recomputes: whole layers, or only their MLPs and experts, without attention, "
        "which is the costliest part for long sequences; this and the next two options have no effect without it",
        default="full",
    )
    recompute_method: Literal["uniform", "block"] = option(
        "with whole layers; uniform: all layers, keeping only the input of each group of recompute_layers; block: "
        "only the first recompute_layers of each stage, or of each of its interleaved parts",
        default="uniform",
    )
    recompute_layers: int = option("see recompute_method", default=1, validator=at_least(1))
    bridge: bool = option(
        "take the model and the names of its tensors from Megatron-Bridge, which must be installed, for families that "
        "this backend has no table of; needs a GPU and TransformerEngine",
        default=False,
    )
    transformer: Literal["auto", "torch", "transformer_engine"] = option(
        "layer implementation: plain torch or TransformerEngine; auto uses TransformerEngine if it is installed and "
        "the device is a GPU, except for context parallelism in float32, for which it has no kernel",
        default="auto",
    )
    fp8: Literal["none", "e4m3", "hybrid"] = option(
        "matrix multiplication in 8 bits: e4m3 throughout, or hybrid, with e5m2 for gradients; needs TransformerEngine",
        default="none",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = option(
        "with fp8, how scales are computed: from earlier steps, per tensor, or per block of a tensor",
        default="blockwise",
    )
    native_checkpoint: bool = option(
        "also write megatron-core's own distributed checkpoint, as `megatron` in the role's directory of each "
        "checkpoint; training waits for it, and CoreRL still resumes from its own",
        default=False,
    )
    nvls: bool = option(
        "let NCCL use NVLink multicast (NVLS); turn off if the container or driver does not allow it", default=True
    )


def too_precise(config: MegatronConfig, precision: str) -> bool:
    """Whether TransformerEngine (2.20) lacks attention for it: its context parallelism only works in 16 bits."""
    return config.context_parallel > 1 and precision == "float32"
