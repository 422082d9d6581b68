"""A training loop as one writes it by hand with megatron-core, to compare the Megatron backend with.

It runs on one rank, with CoreRL's kernel for log-probs. The work's options are more arguments of TransformerConfig. Of
the plugin it has what a CPU needs, and its process groups and initial weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.steps import OPTIMIZER, Plugin, Work, clipped_loss
from corerl.ops.logprobs import token_logprobs
from corerl.ops.packing import PackedSequences
from corerl.types import MicroBatch, PackedBatch
from corerl_megatron.adam import fused_adam
from corerl_megatron.layers import torch_layers
from corerl_megatron.on_host import calling_megatron
from corerl_megatron.packed import packed_params


class HiddenStates(GPTModel):
    """megatron-core's model up to its final norm."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class Bare:
    def __init__(self, work: Work, device: torch.device, plugin: Plugin | None) -> None:
        assert plugin is not None  # whose model this one starts from
        self._device = device
        (chunk,) = plugin.worker.backend.model.chunks  # type: ignore[attr-defined]  # the Megatron backend's
        with calling_megatron(device), fused_adam():  # both do nothing on a GPU with TransformerEngine
            self._build(work, dict(chunk.module.named_parameters()))

    def _build(self, work: Work, weights: dict[str, Tensor]) -> None:
        hf, dtype, device = work.fields, getattr(torch, work.precision), self._device
        on_gpu = device.type == "cuda"
        config = TransformerConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=hf["head_dim"],
            layernorm_epsilon=hf["rms_norm_eps"],
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_cpu_initialization=not on_gpu,
            perform_initialization=False,
            gradient_accumulation_fusion=False,  # its kernel comes with Apex
            apply_rope_fusion=on_gpu,
            bias_activation_fusion=on_gpu,
            **{"persist_layer_norm": False, "bias_dropout_fusion": False, **(work.options)},
        )
        config.finalize_model_grads_func = finalize_model_grads
        model = HiddenStates(
            config,
            _layers(config, on_gpu=on_gpu),
            vocab_size=hf["vocab_size"],
            max_sequence_length=hf["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_parameters"]["rope_theta"],
            share_embeddings_and_output_weights=False,
        ).to(device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._model = DistributedDataParallel(config, buffers, model)
        self._head = model.output_layer.weight
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=OPTIMIZER.lr,
                adam_beta1=OPTIMIZER.betas[0],
                adam_beta2=OPTIMIZER.betas[1],
                adam_eps=OPTIMIZER.eps,
                weight_decay=OPTIMIZER.weight_decay,
                clip_grad=OPTIMIZER.clip_norm,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            [self._model],
            use_gloo_process_groups=False,
        )

    def close(self) -> None:
        pass  # it ends with its process

    def train(self, batch: PackedBatch, *, entropy: bool) -> float:
        """The gradient's norm before it is clipped."""
        with calling_megatron(self._device), fused_adam():
            return self._step(batch, entropy=entropy)

    def _step(self, batch: PackedBatch, *, entropy: bool) -> float:
        self._model.train()
        self._model.zero_grad_buffer()
        forward_backward_no_pipelining(
            forward_step_func=lambda micro_batches, model: self._forward(next(micro_batches), model, batch, entropy),
            data_iterator=iter(batch.micro_batches),
            model=self._model,
            num_microbatches=batch.count,
            seq_length=1,  # not read
            micro_batch_size=1,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr
        _, norm, _ = self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def _forward(self, micro: MicroBatch, model: Any, batch: PackedBatch, entropy: bool) -> tuple[Tensor, Any]:
        tokens, positions = (torch.tensor(x, device=self._device) for x in (micro.tokens, micro.positions))

        def loss(hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            # Behind a sequence's last token another one begins, at a token without a weight.
            targets = torch.cat([tokens[1:], tokens[:1]])
            logprobs, bonus = token_logprobs(
                hidden[:, 0], self._head, targets, temperature=batch.temperature, with_entropy=entropy
            )
            following = None if bonus is None else bonus[:-1]
            # megatron-core divides by the number of micro-batches.
            return clipped_loss(logprobs[:-1], following, micro, self._device) * batch.count, {}

        return model(tokens[None], positions[None], None, packed_seq_params=_packed(micro, self._device)), loss


def _layers(config: TransformerConfig, *, on_gpu: bool) -> Any:
    if not on_gpu:
        return torch_layers(config, vp_stage=None)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)


def _packed(micro: MicroBatch, device: torch.device) -> PackedSeqParams:
    if device.type == "cpu":
        positions = torch.tensor(micro.positions, device=device)
        return packed_params(PackedSequences.of(micro.cu_seqlens, device), None, positions)
    bounds = torch.tensor(micro.cu_seqlens, dtype=torch.int32, device=device)
    longest = int(np.diff(micro.cu_seqlens).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
