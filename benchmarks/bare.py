"""Training loops as one writes them by hand, to compare backends with: `fully_shard`, DeepSpeed, and megatron-core.

Each begins with the plugin's weights and is called in the ranks' process group. With `fully_shard` there are two, see
`PASSES`. The others have CoreRL's log-probs; DeepSpeed's has its attention too. What one reads of the work's options
is the plugin's: `compile`; `stage` and `offload`; for megatron-core more arguments of TransformerConfig.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from benchmarks.steps import OPTIMIZER, Plugin, QuickWeights, Work, clipped_loss
from corerl.models.attention import PACKED, register_packed_attention
from corerl.models.build import decoder_layers
from corerl.models.layouts import packed_call
from corerl.models.names import hf_boxes
from corerl.ops.logprobs import token_logprobs
from corerl.ops.packing import PackedSequences
from corerl.types import MicroBatch, PackedBatch

VARLEN = "bare_varlen"
CHUNK = 2048  # tokens whose logits `varlen` holds at a time
BUCKET = 3 * 2**24  # elements, as the DeepSpeed plugin's defaults
ADAM: Mapping[str, Any] = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps}
Pair = tuple[Tensor, Tensor | None]

# ---- how a micro-batch passes through a model of transformers --------------------------------------------------------
# Each gives log-probs, and entropy if asked: [T - 1], of the micro-batch's tokens but its first one. Those of other
# sequences' first tokens mean nothing.


def varlen(model: Any, micro: MicroBatch, device: torch.device, temperature: float, entropy: bool) -> Pair:
    """Packed sequences through torch's varlen attention; some tokens' logits at a time, computed again for backward."""
    tokens, positions = (torch.tensor(x, device=device) for x in (micro.tokens, micro.positions))
    bounds = torch.tensor(micro.cu_seqlens, dtype=torch.int32, device=device)
    longest = int(np.diff(micro.cu_seqlens).max())
    packing = {f"cu_seq_lens_{x}": bounds for x in "qk"} | {f"max_length_{x}": longest for x in "qk"}
    out = model.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **packing)
    hidden = out.last_hidden_state[0]
    head = model.lm_head.weight.to(hidden.dtype)

    def part(states: Tensor, targets: Tensor) -> Tensor:
        logits = (states @ head.t()).float() / temperature
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        if not entropy:
            return logprobs[:, None]
        log_p = torch.log_softmax(logits, dim=-1)
        return torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)], dim=1)

    following = torch.cat([tokens[1:], tokens[:1]])  # after a sequence's last token comes one without a weight
    parts = zip(hidden.split(CHUNK), following.split(CHUNK), strict=True)
    found = torch.cat([checkpoint(part, *each, use_reentrant=False) for each in parts])[:-1]
    logprobs, *more = (column.clone() for column in found.unbind(1))  # fully_shard's outputs must not be views
    return logprobs, more[0] if more else None


def packed(model: Any, micro: MicroBatch, device: torch.device, temperature: float, entropy: bool) -> Pair:
    """Packed sequences through CoreRL's attention and log-probs."""
    tokens, positions = (torch.tensor(x, device=device) for x in (micro.tokens, micro.positions))
    packing = PackedSequences.of(micro.cu_seqlens, device)
    hidden = model.get_decoder()(**packed_call(tokens, positions, packing)).last_hidden_state[0, :-1]
    head = model.get_output_embeddings().weight
    return token_logprobs(hidden, head, tokens[1:], temperature=temperature, with_entropy=entropy)


PASSES: Mapping[str, Callable[..., Pair]] = {"bare": varlen, "packed": packed}


def attention_of(loop: str) -> str:
    """The name of its attention."""
    if loop == "packed":
        register_packed_attention()
        return PACKED
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)
    return VARLEN


def varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **packing: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D]; returns [1, T, H, D]. Heads are repeated: torch 2.11 requires
    it, and the limit was measured with it. A CPU has no such kernel, and takes sequence by sequence."""
    bounds, longest = packing["cu_seq_lens_q"], packing["max_length_q"]
    if query.device.type == "cpu":
        parts = []
        for start, end in itertools.pairwise(bounds.tolist()):
            q, k, v = (x[:, :, start:end] for x in (query, key, value))
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return torch.cat(parts, dim=2).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators

    groups = query.shape[1] // key.shape[1]
    repeated = (query, *(x.repeat_interleave(groups, 1) for x in (key, value)))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in repeated)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))  # back without end: causal
    assert isinstance(out, Tensor)  # a pair only where the softmax's normalizer is asked for
    return out[None], None


class Policy(nn.Module):
    """A model that ends in log-probs."""

    def __init__(self, model: Any, loop: str, device: torch.device) -> None:
        super().__init__()
        self.model, self._pass, self._device = model, PASSES[loop], device

    def forward(self, micro: MicroBatch, temperature: float, entropy: bool) -> Pair:
        return self._pass(self.model, micro, self._device, temperature, entropy)


# ---- the loops -------------------------------------------------------------------------------------------------------


class Loop:
    """What a side needs."""

    def close(self) -> None:
        pass  # it ends with its process


class Sharded(Loop):
    """`fully_shard` around each layer, and fused AdamW."""

    def __init__(self, work: Work, device: torch.device, plugin: Plugin | None) -> None:
        self._device = device
        config = AutoConfig.for_model(**work.fields)
        how = {"dtype": torch.float32, "attn_implementation": attention_of(work.loop)}
        with device:
            model = AutoModelForCausalLM.from_config(config, **how)
        boxes = hf_boxes(model)  # the plugin's weights have these names: of each expert, where one parameter has all
        weights = QuickWeights({box.name: box.shape for each in boxes.values() for box in each}, device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                for box in boxes[name]:
                    box.view(param).copy_(weights.whole(box.name))
        if work.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mixed = MixedPrecisionPolicy(param_dtype=getattr(torch, work.precision), reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in decoder_layers(model):
            if work.options.get("compile", False):
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        self._model = Policy(model.train(), work.loop, device)
        fully_shard(self._model, mesh=mesh, mp_policy=mixed)
        self._params = list(self._model.parameters())
        # The fastest of torch's three implementations on DTensors, on a CPU too.
        self._optimizer = torch.optim.AdamW(self._params, weight_decay=0.0, fused=True, **ADAM)

    def train(self, batch: PackedBatch, *, entropy: bool) -> float:
        """The gradient's norm before it is clipped."""
        for micro in batch.micro_batches:
            logprobs, entropies = self._model(micro, batch.temperature, entropy)
            loss = clipped_loss(logprobs, entropies, micro, self._device)
            (loss * dist.get_world_size()).backward()  # fully_shard averages over ranks
        norm = nn.utils.clip_grad_norm_(self._params, OPTIMIZER.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor())  # type: ignore[attr-defined]  # a DTensor's


class Zero(Loop):
    """DeepSpeed, which counts micro-batches. Nothing is compiled: with a client's optimizer, here torch's AdamW, none
    of its ops is loaded (0.19.8), and it pins memory through torch."""

    def __init__(self, work: Work, device: torch.device, plugin: Plugin | None) -> None:
        import deepspeed

        self._device, self._linear = device, torch.nn.functional.linear
        self._averages = work.micro_batches * dist.get_world_size()
        # A CPU would compile an operation here that nothing calls; a GPU has none to compile.
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        settings = self._settings(work)
        policy = Policy(self._model(work, settings, deepspeed), "packed", device)
        decays = {True: OPTIMIZER.weight_decay, False: 0.0}  # by whether it is a matrix
        groups = [
            {
                "params": [each for each in policy.parameters() if (len(_shape(each)) >= 2) is matrix],
                "weight_decay": decay,
            }
            for matrix, decay in decays.items()
        ]
        adam = torch.optim.AdamW(groups, fused=True, **ADAM)
        self._engine, *_ = deepspeed.initialize(model=policy, optimizer=adam, config=settings)
        if work.options["stage"] == 3:
            # Its weight is read by a module that it does not belong to.
            deepspeed.zero.register_external_parameter(policy, policy.model.get_output_embeddings().weight)

    @staticmethod
    def _settings(work: Work) -> dict[str, Any]:
        on_gpu, stage = work.device == "cuda", work.options["stage"]
        bucket = BUCKET if on_gpu else 100_000
        zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": on_gpu}
        zero |= {"reduce_bucket_size": bucket}
        zero |= {"stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size": bucket}
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

    def _model(self, work: Work, settings: dict[str, Any], deepspeed: Any) -> Any:
        """With the weights that the plugin begins with."""
        config = AutoConfig.for_model(**work.fields)
        config.use_cache = False
        # zero.Init wraps the constructors of all modules that it finds: those of the model, if they are imported.
        _ = AutoModelForCausalLM._model_mapping[type(config)]
        partitioned = work.options["stage"] == 3
        how = {"dtype": getattr(torch, work.precision), "attn_implementation": attention_of("packed")}
        with deepspeed.zero.Init(config_dict_or_path=settings) if partitioned else self._device:
            model = AutoModelForCausalLM.from_config(config, **how)
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


class Core(Loop):
    """megatron-core on one rank. Of the plugin it has what a CPU needs, its process groups and its initial weights."""

    def __init__(self, work: Work, device: torch.device, plugin: Plugin | None) -> None:
        from corerl_megatron.adam import fused_adam
        from corerl_megatron.on_host import calling_megatron

        assert plugin is not None
        self._device = device
        self._calling = lambda: (calling_megatron(device), fused_adam())  # both do nothing with TransformerEngine
        (chunk,) = plugin.worker.backend.model.chunks  # type: ignore[attr-defined]  # the Megatron backend's
        calling, adam = self._calling()
        with calling, adam:
            self._build(work, dict(chunk.module.named_parameters()))

    def _build(self, work: Work, weights: Mapping[str, Tensor]) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        from corerl_megatron.layers import torch_layers

        hf, dtype, on_gpu = work.fields, getattr(torch, work.precision), self._device.type == "cuda"
        half = {"params_dtype": dtype, "bf16": dtype is torch.bfloat16}
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
            use_cpu_initialization=not on_gpu,
            perform_initialization=False,
            gradient_accumulation_fusion=False,  # its kernel comes with Apex
            apply_rope_fusion=on_gpu,
            bias_activation_fusion=on_gpu,
            **{**half, "persist_layer_norm": False, "bias_dropout_fusion": False, **work.options},
        )
        config.finalize_model_grads_func = finalize_model_grads
        transformer_engine = get_gpt_layer_with_transformer_engine_spec
        model: Any = GPTModel(
            config,
            transformer_engine(qk_layernorm=True) if on_gpu else torch_layers(config, vp_stage=None),
            vocab_size=hf["vocab_size"],
            max_sequence_length=hf["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_parameters"]["rope_theta"],
            share_embeddings_and_output_weights=False,
        ).to(self._device)
        model._postprocess = lambda hidden_states, *_, **__: hidden_states  # it ends with its last norm
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._model = DistributedDataParallel(config, buffers, model)
        self._head = model.output_layer.weight
        adam = OptimizerConfig(
            optimizer="adam",
            lr=OPTIMIZER.lr,
            adam_beta1=OPTIMIZER.betas[0],
            adam_beta2=OPTIMIZER.betas[1],
            adam_eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
            clip_grad=OPTIMIZER.clip_norm,
            use_distributed_optimizer=True,
            **half,
        )
        self._optimizer = get_megatron_optimizer(adam, [self._model], use_gloo_process_groups=False)

    def train(self, batch: PackedBatch, *, entropy: bool) -> float:
        """The gradient's norm before it is clipped."""
        calling, adam = self._calling()
        with calling, adam:
            return self._step(batch, entropy=entropy)

    def _step(self, batch: PackedBatch, *, entropy: bool) -> float:
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

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

        return model(tokens[None], positions[None], None, packed_seq_params=self._packed(micro, positions)), loss

    def _packed(self, micro: MicroBatch, positions: Tensor) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        from corerl_megatron.packed import packed_params

        if self._device.type == "cpu":
            return packed_params(PackedSequences.of(micro.cu_seqlens, self._device), None, positions)
        bounds = torch.tensor(micro.cu_seqlens, dtype=torch.int32, device=self._device)
        longest = int(np.diff(micro.cu_seqlens).max())
        lengths = {f"cu_seqlens_{x}": bounds for x in ("q", "kv")} | {f"max_seqlen_{x}": longest for x in ("q", "kv")}
        return PackedSeqParams(qkv_format="thd", **lengths)


BARE = {"fsdp": Sharded, "deepspeed": Zero, "megatron": Core}
