"""Build megatron-core's model on this rank: it allocates the rank's share of parameters, but loads nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from corerl.config import RoleConfig
from corerl.errors import PluginError
from corerl.models import VALUE_HEAD
from corerl_megatron.config import MegatronConfig, too_precise
from corerl_megatron.families import SWIGLU_ALPHA, Architecture
from corerl_megatron.layers import (
    add_choice_bias,
    change_what_is_added,
    engine_layers,
    finish_latent,
    make_alternating,
    share_rotary,
    torch_layers,
    use_local_rope,
)

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
Specify: TypeAlias = Callable[..., Any]  # gives the specification of this rank's layers, as `torch_layers` does


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(SWIGLU_ALPHA * x)


# The functions by which megatron-core's fused kernels are found, of which the second is the one with tanh; and the same
# functions without kernels. megatron-core's own quick_gelu is compiled, which costs seconds on a CPU.
FUSED = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "quick_gelu": quick_gelu}
ACTIVATIONS = {**FUSED, "gelu": partial(nn.functional.gelu, approximate="tanh"), "quick_gelu": _quick_gelu}


class PackedModel(GPTModel):
    """One stage, or one of its interleaved parts. The last returns hidden states [t, 1, hidden] after the final norm;
    the plugin computes outputs from them without ever holding all logits. A critic has a value head instead of its
    language-model head."""

    logits_scale = 1.0  # by which logits are divided

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def become_critic(self) -> None:
        del self.output_layer
        weight = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype, device="cuda")
        self.add_module(VALUE_HEAD, weight)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        critic = hasattr(self, VALUE_HEAD)
        # After the last layer megatron-core expects a language-model head here.
        with mock.patch.object(self, "post_process", self.post_process and not critic):
            return super().sharded_state_dict(*args, **kwargs)

    def scale_embeddings(self, scale: float, *, rounded: bool) -> None:
        factor = float(torch.tensor(scale, dtype=self.config.params_dtype)) if rounded else scale
        self.embedding.register_forward_hook(lambda embedding, args, embedded: embedded * factor)

    def leave_out(self, padding: int) -> None:
        """Stop the embedding's gradient at this input token, as transformers' models do."""

        def without_gradient(embedding: nn.Module, args: Any, inputs: dict[str, Any], embedded: Tensor) -> Tensor:
            counts = (inputs["input_ids"] != padding).t()[..., None]  # [tokens, 1, 1]
            if self.config.sequence_parallel:
                group = self.pg_collection.tp
                counts = counts.chunk(group.size())[group.rank()]
            return torch.where(counts, embedded, embedded.detach())

        self.embedding.register_forward_hook(without_gradient, with_kwargs=True)

    @property
    def head(self) -> Tensor:
        """The head's weight: [rows of this rank, hidden] for a language-model head, [1, hidden] for a value head."""
        if hasattr(self, VALUE_HEAD):
            weight: Tensor = getattr(self, VALUE_HEAD).weight
            return weight
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else (self.output_layer.weight)
        )


def stages(role: RoleConfig, architecture: Architecture, *, device: torch.device) -> list[PackedModel]:
    """This rank's stage, or its interleaved parts in order. Called inside `calling_megatron`, after `make_groups`."""
    engine = uses_transformer_engine(role.options, role.train.precision, device)
    config = transformer_config(role, architecture, engine=engine, device=device)
    virtual = role.options.virtual_pipeline
    parts: list[int | None] = list(range(virtual)) if virtual > 1 else [None]
    specify: Specify = torch_layers
    if engine:  # adapters need what norms give
        specify = partial(engine_layers, norms_apart=role.lora is not None)
    return [
        _stage(config, architecture, part, specify, engine=engine, critic=role.value_head).to(device) for part in parts
    ]


def uses_transformer_engine(options: MegatronConfig, precision: str, device: torch.device) -> bool:
    """Whether layers use TransformerEngine. Raises PluginError if it is requested but not installed."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    asked = {"transformer": options.transformer == "transformer_engine", "fp8": options.fp8 != "none"}
    for name in (name for name, wanted in asked.items() if wanted and not installed):
        raise PluginError(
            f"backends.megatron.{name}={getattr(options, name)!r} needs TransformerEngine, which is not installed in "
            f"{sys.prefix}; remove the setting, or install TransformerEngine as `corerl doctor megatron` says"
        )
    able = installed and device.type == "cuda" and not too_precise(options, precision)
    return any(asked.values()) or (options.transformer == "auto" and able)


def transformer_config(
    role: RoleConfig, architecture: Architecture, *, engine: bool, device: torch.device
) -> TransformerConfig:
    options: MegatronConfig = role.options
    arguments: dict[str, Any] = {
        **architecture.transformer,
        **settings(role, experts=architecture.experts > 0, engine=engine, device=device),
        "activation_func": (FUSED if engine else ACTIVATIONS)[architecture.activation],
        # Its kernel leaves out YaRN's factor, and does not turn pairs of neighbors, as latent attention does.
        "apply_rope_fusion": engine and not architecture.yarn and not architecture.latent,
        "bias_activation_fusion": engine,
    }
    if architecture.clamp is not None:
        arguments |= {"activation_func_clamp_value": architecture.clamp, "glu_linear_offset": 1.0}
    if options.fp8 != "none":
        arguments |= {"fp8": options.fp8, "fp8_recipe": options.fp8_recipe}
    config = (MLATransformerConfig if architecture.latent else TransformerConfig)(**arguments)
    for name, value in architecture.yarn.items():
        setattr(config, name, value)
    return config


def settings(role: RoleConfig, *, experts: bool, engine: bool, device: torch.device) -> dict[str, Any]:
    """Arguments of TransformerConfig that do not depend on the model."""
    options: MegatronConfig = role.options
    dtype = getattr(torch, role.train.precision)
    found: dict[str, Any] = {
        "tensor_model_parallel_size": options.tensor_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": options.virtual_pipeline if options.virtual_pipeline > 1 else None,
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": options.expert_tensor_parallel or options.tensor_parallel,
        "sequence_parallel": options.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,  # weights are read, or drawn by name: the same in every layout
        "calculate_per_token_loss": True,  # gradients are sums: token weights include 1 / denominator
        "variable_seq_lengths": options.pipeline_parallel > 1,  # packed micro-batches differ in length
        # For dense models too: the default refuses variable lengths.
        "moe_token_dispatcher_type": "alltoall",
        # Batched transfers between interleaved stages silently give wrong results.
        "batch_p2p_comm": options.virtual_pipeline == 1,
        "overlap_p2p_comm": options.virtual_pipeline > 1,
        "gradient_accumulation_fusion": False,  # its kernel comes with Apex
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": True,
    }
    if role.train.recompute == "full" and options.recompute == "full":
        found |= {
            "recompute_granularity": "full",
            "recompute_method": options.recompute_method,
            "recompute_num_layers": options.recompute_layers,
        }
    elif role.train.recompute == "full":
        found |= {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}  # dense, experts
    if experts:
        found |= {
            "moe_grouped_gemm": engine,
            "moe_permute_fusion": engine,
            "moe_router_load_balancing_type": "none",  # `balance` has the plugin's own
        }
    return found


def padded_vocabulary(vocabulary: int, tensor_ranks: int) -> int:
    """The vocabulary size, rounded up so that every rank holds equally many rows."""
    return -(-vocabulary // tensor_ranks) * tensor_ranks


def _stage(
    config: TransformerConfig,
    architecture: Architecture,
    stage: int | None,
    specify: Specify,
    *,
    engine: bool,
    critic: bool,
) -> PackedModel:
    at: Mapping[str, Any] = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    last = parallel_state.is_pipeline_last_stage(**at)
    module = PackedModel(
        config=config,
        transformer_layer_spec=specify(config, vp_stage=stage),
        vocab_size=padded_vocabulary(architecture.vocabulary, config.tensor_model_parallel_size),
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=last,
        parallel_output=True,
        vp_stage=stage,
        **architecture.gpt,
    )
    module.logits_scale = architecture.logits_scale
    if module.pre_process and architecture.embedding_scale != 1:
        module.scale_embeddings(architecture.embedding_scale, rounded=architecture.rounds_scale)
    rotary = None
    if architecture.local_rotary_base is not None:
        rotary = RotaryEmbedding(
            config.kv_channels,
            rotary_percent=1.0,
            rotary_base=architecture.local_rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
        )
    for layer in module.decoder.layers:
        _finish(layer, config, architecture, rotary, engine=engine)
    attentions = [layer.self_attention for layer in module.decoder.layers]
    share_rotary([attention for attention in attentions if isinstance(attention, MLASelfAttention)])
    if critic and last:
        module.become_critic()
    if module.pre_process and architecture.padding is not None:
        module.leave_out(architecture.padding)
    return module


def _finish(
    layer: TransformerLayer,
    config: TransformerConfig,
    architecture: Architecture,
    local: RotaryEmbedding | None,
    *,
    engine: bool,
) -> None:
    """Add what the specification of layers cannot say."""
    if isinstance(layer.self_attention, MLASelfAttention):
        finish_latent(layer.self_attention, engine=engine)
    if local and is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number):
        use_local_rope(layer.self_attention, local)
    if architecture.norms_after or architecture.residual_scale != 1:
        change_what_is_added(layer, norms=architecture.norms_after, scale=architecture.residual_scale)
    if isinstance(layer.mlp, MoELayer) and architecture.choice_bias:
        add_choice_bias(layer.mlp.router)
    if isinstance(layer.mlp, MoELayer) and architecture.alternating:
        make_alternating(layer.mlp.experts)
