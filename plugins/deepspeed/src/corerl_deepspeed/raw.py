"""The DeepSpeed settings that `[backends.deepspeed.raw]` may hold, and what to set in the place of others.

The driver checks the names before a device is taken, without importing DeepSpeed, which ignores most that it does not
know. It checks the values itself as it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from corerl.messages import did_you_mean

ZERO = "zero_optimization"

# Settings of DeepSpeed's JSON, tables as a whole -> the stages that read them.
SETTABLE: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("communication_data_type", "disable_python_gc", "log_level", "steps_per_print"), (1, 2, 3)),
    **dict.fromkeys(("dump_state", "wall_clock_breakdown", "memory_breakdown"), (1, 2, 3)),
    **dict.fromkeys(("comms_logger", "flops_profiler", "timers"), (1, 2, 3)),
    **dict.fromkeys((f"{ZERO}.contiguous_gradients", f"{ZERO}.reduce_scatter"), (1, 2, 3)),
    f"{ZERO}.overlap_comm": (2, 3),  # stage 1 reduces gradients only after all computation
    **{
        f"{ZERO}.{name}": (1, 2)
        for name in ("use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "parameter_alignment")
    },
    **{
        f"{ZERO}.{name}": (3,)
        for name in (
            "sub_group_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "leaf_module",
        )
    },
}
INSTEAD: Mapping[str, str] = {
    "train_batch_size": "set rollout.prompts and train.mini_batches",
    **dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "set train.tokens_per_micro_batch"
    ),
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types"), "set train.precision"),
    "gradient_clipping": "set train.optimizer.clip_norm",
    "optimizer": "set train.optimizer, which is AdamW",
    "scheduler": "set train.schedule",
    "activation_checkpointing": "set train.recompute",
    **dict.fromkeys(
        ("tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size"),
        "use the megatron backend, which splits matrices, experts, layers and sequences",
    ),
    f"{ZERO}.stage": "set stage",
    f"{ZERO}.offload_optimizer": "set offload='optimizer'",
    f"{ZERO}.offload_param": "set offload='parameters'",
    f"{ZERO}.zero_hpz_partition_size": "set node_shard_size",
    f"{ZERO}.reduce_bucket_size": "set reduce_bucket",
    **dict.fromkeys((f"{ZERO}.allgather_bucket_size", f"{ZERO}.stage3_prefetch_bucket_size"), "set gather_bucket"),
}


def refusals(raw: Mapping[str, Any], stage: int) -> Iterator[tuple[str, str]]:
    """(dotted path, what is wrong with it) for each setting in the user's table that is not allowed in `stage`."""
    zero = raw.get(ZERO, {})
    if not isinstance(zero, Mapping):
        yield ZERO, f"expected a table, got {zero!r}"
        return
    for path in (*(name for name in raw if name != ZERO), *(f"{ZERO}.{name}" for name in zero)):
        stages = SETTABLE.get(path)
        if path in INSTEAD:
            yield path, f"cannot be set here: {INSTEAD[path]}; remove it here"
        elif stages is None:
            yield path, f"is no setting that can be set here{did_you_mean(path, SETTABLE)}"
        elif stage not in stages:
            others = " or ".join(map(str, stages))
            yield path, f"has no effect with stage={stage}; set stage={others}, or remove it"
