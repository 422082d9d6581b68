"""The DeepSpeed settings that `[backends.deepspeed.raw]` may hold, and for all others, what to set instead.

The names are those of DeepSpeed 0.19.8, listed here because the driver checks them before a device is taken, without
importing torch or DeepSpeed. A test compares them, in both directions, with all that the installed DeepSpeed reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import Attribute, field, fields, frozen, has, resolve_types

from corerl.config import at_least, spell_value
from corerl.messages import nearest

ZERO = "zero_optimization"


def whole(_: Any, attribute: Attribute[Any], value: float) -> None:
    if value < 0 or value % 1:
        raise ValueError(f"must be a whole number of at least 0, got {value!r}")


def count() -> Any:
    """A whole number that may be written as 1e9, as in DeepSpeed's documentation."""
    return field(default=0.0, validator=whole)


# ---- what may be set, under DeepSpeed's names; the defaults here are not used: the user's table is merged as it is ---


@frozen(kw_only=True)
class LeafModule:
    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@frozen(kw_only=True)
class Zero:
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = True
    overlap_comm: bool = False
    sub_group_size: float = count()
    stage3_param_persistence_threshold: float = count()
    stage3_model_persistence_threshold: float = count()
    stage3_max_live_parameters: float = count()
    stage3_max_reuse_distance: float = count()
    stage3_module_granularity_threshold: float = count()
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    parameter_alignment: bool = False
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    leaf_module: LeafModule = LeafModule()


@frozen(kw_only=True)
class CommsLogger:
    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: tuple[str, ...] = ()


@frozen(kw_only=True)
class FlopsProfiler:
    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str = ""


@frozen(kw_only=True)
class ThroughputTimer:
    enabled: bool = True
    synchronized: bool = True


@frozen(kw_only=True)
class Timers:
    throughput: ThroughputTimer = ThroughputTimer()


@frozen(kw_only=True)
class Settable:
    zero_optimization: Zero = Zero()
    communication_data_type: Literal["fp32", "bf16", "fp16"] = "fp32"
    disable_python_gc: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "error"
    steps_per_print: int = field(default=1, validator=at_least(1))
    dump_state: bool = False
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    comms_logger: CommsLogger = CommsLogger()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    timers: Timers = Timers()


# Settings of `zero_optimization` that not every stage reads.
STAGES_1_AND_2 = ("use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "parameter_alignment")
STAGE_3 = (
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

# ---- what may not be set, as dotted paths; a table stands for everything in it ---------------------------------------

LOOP = "CoreRL drives the loop: it makes batches and takes steps outside of DeepSpeed"
DENOMINATOR = "token weights contain the loss's denominator, and DeepSpeed's averaging is undone"
ADAMW = "the optimizer is torch's AdamW; set train.optimizer"
EXPERTS = "this backend does not split experts over ranks; the megatron backend does"
SEQUENCES = "this backend does not split sequences; the megatron backend does"
CHECKPOINTS = "CoreRL writes its own checkpoints, from which every backend can resume; see [checkpoint]"
NVME = "which uses host memory; on NVMe, sleep and checkpoints could not reach"
OPTIMIZER = f"set offload='optimizer', {NVME} masters and moments"
PARAMETERS = f"set offload='parameters', {NVME} weights"
ROUNDED = "gathered weights would differ from the trained ones"
NOTHING = "it has no effect on this backend"
GONE = "DeepSpeed no longer has it"

ELSEWHERE = {
    "train_batch_size": f"{LOOP}; see rollout.prompts and train.mini_batches",
    "train_micro_batch_size_per_gpu": f"{LOOP}; set train.tokens_per_micro_batch",
    "gradient_accumulation_steps": f"{LOOP}; set train.tokens_per_micro_batch",
    "managed_gradient_accumulation": LOOP,
    "data_efficiency": LOOP,
    "dataloader_drop_last": LOOP,
    "autotuning": "it needs DeepSpeed's launcher, which CoreRL does not use",
    "hybrid_engine": "CoreRL's engines sample; see [rollout]",
    "gradient_clipping": "set train.optimizer.clip_norm",
    "optimizer": "set train.optimizer, which is AdamW",
    "zero_allow_untested_optimizer": ADAMW,
    "zero_force_ds_cpu_optimizer": ADAMW,
    "scheduler": "set train.schedule",
    "fp16": "set train.precision",
    "bf16": "set train.precision",
    "bfloat16": "set train.precision",
    "amp": "set train.precision",
    "torch_autocast": "set train.precision",
    "data_types": "set train.precision; gradients are summed in float32",
    "weight_quantization": ROUNDED,
    "prescale_gradients": DENOMINATOR,
    "gradient_predivide_factor": DENOMINATOR,
    "gradient_allreduce_op": DENOMINATOR,
    "activation_checkpointing": "set train.recompute",
    "tensor_parallel": "this backend does not split matrices (AutoTP); the megatron backend does",
    "expert_parallel": EXPERTS,
    "use_data_before_expert_parallelism": EXPERTS,
    "sequence_parallel_size": f"{SEQUENCES}, and DeepSpeed's Ulysses drops the mask of packed sequences",
    "data_parallel_size": f"{SEQUENCES}; all ranks of the role are data-parallel",
    "seq_parallel_communication_data_type": SEQUENCES,
    "pipeline": "this backend does not split layers over ranks; the megatron backend does",
    "compile": "this backend does not compile models, and has not been tested with DeepSpeed's compiler",
    "checkpoint": CHECKPOINTS,
    "datastates_ckpt": CHECKPOINTS,
    "tensorboard": "add an extension, such as tensorboard",
    "wandb": "add an extension, such as wandb",
    "comet": "add an extension, such as wandb",
    "csv_monitor": "add an extension, such as jsonl",
    "aio": "it is for NVMe, where sleep and checkpoints could not reach masters, moments or weights",
    "disable_allgather": NOTHING,
    "vocabulary_size": NOTHING,
    f"{ZERO}.allgather_partitions": NOTHING,
    f"{ZERO}.stage": "set stage",
    f"{ZERO}.offload_optimizer": OPTIMIZER,
    f"{ZERO}.cpu_offload": OPTIMIZER,
    f"{ZERO}.offload_param": PARAMETERS,
    f"{ZERO}.cpu_offload_param": PARAMETERS,
    f"{ZERO}.cpu_offload_use_pin_memory": "set offload; what is offloaded from a GPU is always pinned",
    f"{ZERO}.zero_hpz_partition_size": "set node_shard_size",
    f"{ZERO}.reduce_bucket_size": "set reduce_bucket",
    f"{ZERO}.allgather_bucket_size": "set gather_bucket",
    f"{ZERO}.stage3_prefetch_bucket_size": "set gather_bucket",
    f"{ZERO}.prefetch_bucket_size": "set gather_bucket",
    f"{ZERO}.compute_grad_norm": "every step reports the norm",
    f"{ZERO}.zero_quantized_weights": ROUNDED,
    f"{ZERO}.zero_quantized_nontrainable_weights": ROUNDED,
    f"{ZERO}.zero_quantized_gradients": "gradients would be rounded to 4 bits",
    f"{ZERO}.zenflow": "checkpoints could not find masters and moments",
    f"{ZERO}.round_robin_gradients": "checkpoints could not find parameters",
    f"{ZERO}.save_muon_momentum_buffer_in_memory": ADAMW,
    f"{ZERO}.elastic_checkpoint": CHECKPOINTS,
    f"{ZERO}.load_from_fp32_weights": CHECKPOINTS,
    f"{ZERO}.pipeline_loading_checkpoint": CHECKPOINTS,
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": CHECKPOINTS,
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": CHECKPOINTS,
    f"{ZERO}.memory_efficient_linear": NOTHING,
    f"{ZERO}.override_module_apply": NOTHING,
    f"{ZERO}.legacy_stage1": GONE,
    **dict.fromkeys(
        (
            "compression_training",
            "curriculum_learning",
            "eigenvalue",
            "elasticity",
            "graph_harvesting",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
            "sparse_gradients",
            f"{ZERO}.mics_hierarchical_params_gather",
            f"{ZERO}.mics_shard_size",
            f"{ZERO}.zeropp_loco_param",
        ),
        GONE,
    ),
}


def settable(table: type = Settable, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings that may be set, tables before their contents."""
    for each in fields(resolve_types(table)):
        yield f"{prefix}{each.name}"
        if isinstance(each.type, type) and has(each.type):
            yield from settable(each.type, f"{prefix}{each.name}.")


def refusals(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted path, what is wrong with it) for each setting in the user's table that is not allowed."""
    from corerl.config import try_structure  # slow to import, and not needed to list the spec

    known = {*settable(), *ELSEWHERE}
    for problem in try_structure(raw, Settable)[1]:
        path = ".".join(map(str, problem.keys))
        table, _, key = path.rpartition(".")
        if path in ELSEWHERE:
            yield path, f"{_got(raw, problem.keys)} cannot be set here: {ELSEWHERE[path]}; remove it here"
        elif path not in known and (near := nearest(key, _names(known, table))):
            yield path, f"unknown key; did you mean {near!r}?"
        else:
            yield path, problem.text


def unread(raw: Mapping[str, Any], stage: int) -> Iterator[tuple[str, str]]:
    """(dotted path, what is wrong with it) for each setting that `stage` does not read, of a table without refusals."""
    others: tuple[str, ...] = STAGE_3
    fix = "set stage=3, or remove it"
    if stage == 3:
        others, fix = STAGES_1_AND_2, "set stage=1 or 2, or remove it"
    for name, value in raw.get(ZERO, {}).items():
        if name in others:
            yield f"{ZERO}.{name}", f"{spell_value(value)} with stage={stage}, which ignores it; {fix}"


def _names(paths: set[str], table: str) -> list[str]:
    return sorted(name for path in paths for inside, _, name in [path.rpartition(".")] if inside == table)


def _got(raw: Mapping[str, Any], keys: tuple[str | int, ...]) -> str:
    value: Any = raw
    for key in keys:
        value = value[key]
    return spell_value(value)
