"""A training loop as one writes it by hand with DeepSpeed and transformers, to compare the DeepSpeed backend with.

It has CoreRL's attention and log-probs and nothing of the plugin: DeepSpeed counts micro-batches, and its settings are
written here. Of the work's options it reads `stage`, `offload` and `cpu_adam`, which steps with DeepSpeed's own Adam.

Nothing is compiled: with a client's optimizer, here torch's AdamW, DeepSpeed 0.19.8 loads none of its ops, and it pins
memory through torch. Only `cpu_adam` compiles, with g++ and, on a machine with a GPU, CUDA's headers.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bare_fsdp import Packed
from benchmarks.steps import OPTIMIZER, Plugin, QuickWeights, Work, clipped_loss
from corerl.types import PackedBatch

BUCKET = 3 * 2**24  # elements, as the plugin's defaults


class Bare:
    """Called on every rank."""

    def __init__(self, work: Work, device: torch.device, plugin: Plugin | None) -> None:
        self._device, self._linear = device, torch.nn.functional.linear
        self._averages = work.micro_batches * dist.get_world_size()
        # A CPU would compile an operation here that nothing calls; a GPU has none to compile.
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        settings = self._settings(work)
        policy = Packed(self._model(work, settings), device)
        matrices = [param for param in policy.parameters() if len(_shape(param)) >= 2]
        others = [param for param in policy.parameters() if len(_shape(param)) < 2]
        groups = [
            {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        adam: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps}
        optimizer = (
            DeepSpeedCPUAdam(groups, **adam)
            if work.options.get("cpu_adam")
            else torch.optim.AdamW(groups, fused=True, **adam)
        )
        self._engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings)
        if work.options["stage"] == 3:
            # Its weight is read by a module that it does not belong to.
            deepspeed.zero.register_external_parameter(policy, policy.model.get_output_embeddings().weight)

    @staticmethod
    def _settings(work: Work) -> dict[str, Any]:
        on_gpu = work.device == "cuda"
        bucket = BUCKET if on_gpu else 100_000
        zero: dict[str, Any] = {
            "stage": work.options["stage"],
            "contiguous_gradients": True,
            "overlap_comm": on_gpu,
            "reduce_bucket_size": bucket,
        }
        zero |= (
            {"stage3_prefetch_bucket_size": bucket} if work.options["stage"] == 3 else {"allgather_bucket_size": bucket}
        )
        if work.options.get("offload") == "optimizer":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": work.micro_batches,
            "gradient_clipping": OPTIMIZER.clip_norm,
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": work.precision == "bfloat16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": zero,
        }

    def _model(self, work: Work, settings: dict[str, Any]) -> Any:
        """With the weights that the plugin begins with."""
        config = AutoConfig.for_model(**work.fields)
        config.use_cache = False
        # zero.Init wraps the constructors of all modules that it finds: those of the model, if they are imported.
        _ = AutoModelForCausalLM._model_mapping[type(config)]
        partitioned = work.options["stage"] == 3
        with deepspeed.zero.Init(config_dict_or_path=settings) if partitioned else self._device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, work.precision), attn_implementation=Packed.attention(config, self._device)
            )
        model.tie_weights()  # zero.Init takes them apart
        if work.recompute == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        weights = QuickWeights({name: _shape(param) for name, param in model.named_parameters()}, self._device)
        for name, param in model.named_parameters():
            with torch.no_grad(), deepspeed.zero.GatheredParameters(param, 0) if partitioned else nullcontext():
                if dist.get_rank() == 0 or not partitioned:  # what rank 0 writes is sent to the others
                    param.copy_(weights.whole(name))
        return model

    def train(self, batch: PackedBatch, *, entropy: bool) -> float:
        """The gradient's norm before it is clipped."""
        self._engine.train()
        for micro in batch.micro_batches:
            # DeepSpeed divides by the number of micro-batches and of ranks.
            logprobs, entropies = self._engine(micro, batch.temperature, entropy)
            loss = clipped_loss(logprobs, entropies, micro, self._device)
            self._engine.backward(loss * self._averages)
            self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def close(self) -> None:
        self._engine.destroy()
        del self._engine
        torch.nn.functional.linear = self._linear  # which zero.Init has replaced
        gc.collect()


def _shape(param: Any) -> tuple[int, ...]:
    """Of the whole parameter, also where it is partitioned."""
    return tuple(getattr(param, "ds_shape", param.shape))
