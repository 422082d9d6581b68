"""DeepSpeed's own configuration, made of [train], the options, and the user's table of it. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from corerl.config.schema import TrainConfig
from corerl_deepspeed.config import DeepSpeedConfig

LOOP = "CoreRL drives the loop: batches are made, and steps are taken, outside of DeepSpeed"
ZERO = "zero_optimization"
NVME = "which is host memory; on NVMe neither sleep nor a checkpoint would find"

# DeepSpeed's settings, dotted, that have another place. A table stands for all that is in it.
ELSEWHERE = {
    "train_batch_size": f"{LOOP}; see rollout.prompts and train.mini_batches",
    "train_micro_batch_size_per_gpu": f"{LOOP}; set train.tokens_per_micro_batch",
    "gradient_accumulation_steps": f"{LOOP}; set train.tokens_per_micro_batch",
    "managed_gradient_accumulation": LOOP,
    "gradient_clipping": "set train.optimizer.clip_norm",
    "optimizer": "set train.optimizer, which is AdamW",
    "scheduler": "set train.schedule",
    "fp16": "set train.precision",
    "bf16": "set train.precision",
    "torch_autocast": "set train.precision",
    "data_types.grad_accum_dtype": "gradients are summed in float32",
    "prescale_gradients": "the tokens' weights hold the denominator, and DeepSpeed's average is undone",
    "gradient_predivide_factor": "the tokens' weights hold the denominator, and DeepSpeed's average is undone",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's AdamW",
    "activation_checkpointing": "set train.recompute",
    "tensor_parallel": "this backend splits no matrices; the backend megatron does",
    "expert_parallel": "this backend splits no experts over ranks; the backend megatron does",
    "sequence_parallel_size": "this backend splits no sequences; the backend megatron does",
    "compile": "DeepSpeed's compiler counts micro-batches itself, and CoreRL's steps vary in theirs",
    "checkpoint": "checkpoints are CoreRL's own, which every backend resumes; see [checkpoint]",
    "tensorboard": "add an extension, such as tensorboard",
    "wandb": "add an extension, such as wandb",
    "csv_monitor": "add an extension, such as jsonl",
    f"{ZERO}.stage": "set stage",
    f"{ZERO}.offload_optimizer": f"set offload='optimizer', {NVME} masters and moments",
    f"{ZERO}.offload_param": f"set offload='parameters', {NVME} weights",
    f"{ZERO}.zero_hpz_partition_size": "set node_shard_size",
    f"{ZERO}.reduce_bucket_size": "set reduce_bucket",
    f"{ZERO}.allgather_bucket_size": "set gather_bucket",
    f"{ZERO}.stage3_prefetch_bucket_size": "set gather_bucket",
    f"{ZERO}.zero_quantized_weights": "gathered weights would not be the trained ones, bit for bit",
    f"{ZERO}.zero_quantized_gradients": "gradients would be rounded to 4 bits",
    f"{ZERO}.zenflow": "masters and moments would be where no checkpoint finds them",
    f"{ZERO}.round_robin_gradients": "parameters would lie where no checkpoint finds them",
}


def contradictions(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted path, where it is said instead) of each setting in the user's table that has another place."""
    for path in _paths(raw):
        for known, instead in ELSEWHERE.items():
            if path == known or path.startswith(f"{known}."):
                yield path, instead
                break


def deepspeed_json(
    options: DeepSpeedConfig, train: TrainConfig, *, device: str, elements: int, persistent: int
) -> dict[str, Any]:
    """What DeepSpeed is started with, for a model of `elements` parameters, of which it keeps those of `persistent`
    elements or fewer gathered."""
    on_host = {"device": "cpu", "pin_memory": device == "cuda"}
    offload = {
        "none": {},
        "optimizer": {"offload_optimizer": on_host},
        "parameters": {"offload_optimizer": on_host, "offload_param": on_host},
    }[options.offload]
    zero: dict[str, Any] = {
        "stage": options.stage,
        "contiguous_gradients": True,
        # In stage 1 gradients are reduced after the last micro-batch, when there is no computation left beside it.
        "overlap_comm": device == "cuda" and options.stage > 1,
        "reduce_bucket_size": min(options.reduce_bucket, elements),
        **offload,
    }
    if options.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": min(options.gather_bucket, elements),
            "stage3_param_persistence_threshold": persistent,
            "zero_hpz_partition_size": options.node_shard_size,
        }
    else:
        zero["allgather_bucket_size"] = options.gather_bucket // 2 * 2  # DeepSpeed wants it even
    half = train.precision == "bfloat16"
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": train.optimizer.clip_norm,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        ZERO: zero,
    }
    return _merged(own, options.raw)


def _paths(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{path}.")
        else:
            yield path


def _merged(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(own[key], value) if isinstance(value, Mapping) and isinstance(own.get(key), Mapping) else value
        for key, value in more.items()
    }
    return {**own, **both}
