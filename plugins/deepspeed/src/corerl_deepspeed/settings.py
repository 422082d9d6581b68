"""Make DeepSpeed's own configuration from [train], the options, and the user's raw table. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corerl.config import TrainConfig
from corerl_deepspeed.config import DeepSpeedConfig
from corerl_deepspeed.raw import ZERO


def deepspeed_json(
    options: DeepSpeedConfig,
    train: TrainConfig,
    *,
    device: str,
    elements: int,
    trained: int,
    persistent: int,
    frozen: bool = False,
) -> dict[str, Any]:
    """The configuration that DeepSpeed is started with, for a model of `elements` parameters in total, of which
    `trained` get gradients; tensors of at most `persistent` elements stay gathered. Of a `frozen` model parameters
    alone are sharded or offloaded, and gathered for no backward pass."""
    on_host = {"device": "cpu", "pin_memory": device == "cuda"}
    offload: dict[str, Any] = {}
    if options.offload != "none" and not frozen:
        offload["offload_optimizer"] = on_host
    if options.offload == "parameters":
        offload["offload_param"] = on_host
    zero: dict[str, Any] = {
        "stage": options.stage,
        "contiguous_gradients": True,
        # In stage 1 gradients are reduced after the last micro-batch, when no computation is left to overlap with.
        "overlap_comm": device == "cuda" and options.stage > 1,
        "reduce_bucket_size": min(options.reduce_bucket, trained),
        **offload,
    }
    if options.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": min(options.gather_bucket, elements),
            "stage3_param_persistence_threshold": persistent,
            "zero_hpz_partition_size": 1 if frozen else options.node_shard_size,
        }
    else:
        zero["allgather_bucket_size"] = options.gather_bucket // 2 * 2  # must be even
    half = train.precision == "bfloat16"
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
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


def _merged(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(own[key], value) if isinstance(value, Mapping) and isinstance(own.get(key), Mapping) else value
        for key, value in more.items()
    }
    return {**own, **both}
