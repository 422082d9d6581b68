"""What plays Megatron-Bridge where it cannot be installed: those parts of 0.6's interface that the plugin asks, with
megatron-core's own modules, and mappings for GLM-4.5, a family that the plugin's table has too.

Its layers are the plugin's, in plain torch. Norms of queries and keys are centered at 0, which Hugging Face's are not.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from attrs import evolve, frozen
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from corerl.models import stored_buffers
from corerl_megatron.families import architecture
from corerl_megatron.layers import torch_layers
from corerl_megatron.model import ACTIVATIONS

# ---- mappings --------------------------------------------------------------------------------------------------------


@frozen
class Whole:
    """The tensor as it is. Names have a * for each number."""

    hf_param: Any  # a name, or several by what they are
    is_expert: bool = False
    allow_hf_name_mismatch: bool = False

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's, of equal parts."""
        if self.is_expert:
            rank = parallel_state.get_expert_tensor_parallel_rank()
            return tensor.chunk(parallel_state.get_expert_tensor_parallel_world_size(), dim)[rank]
        rank = parallel_state.get_tensor_model_parallel_rank()
        return tensor.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)[rank]

    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        return weights.to(next(chain(module.parameters(), module.buffers())).dtype)


class Vocabulary(Whole):
    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return self.part(nn.functional.pad(weights, (0, 0, 0, -len(weights) % ranks)), 0)


class Columns(Whole):
    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        return self.part(weights, 1)


class Gated(Whole):
    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        return torch.cat([self.part(weights["gate"], 0), self.part(weights["up"], 0)])


class QKV(Whole):
    def hf_to_megatron(self, weights: Any, module: Any) -> Tensor:
        groups = module.config.num_query_groups
        by_group = torch.cat([weights[name].unflatten(0, (groups, -1)) for name in ("q", "k", "v")], 1)
        return self.part(by_group.flatten(0, 1), 0)


class Centered(Whole):
    """Of a norm that adds 1."""

    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        centered: Tensor = weights - 1
        return centered


LAYER, HF = "decoder.layers.*", "model.layers.*"
EXPERT = f"{LAYER}.mlp.experts.local_experts.*"


def gated(hf: str) -> dict[str, str]:
    return {name: f"{hf}.{name}_proj.weight" for name in ("gate", "up")}


MAPPINGS: Mapping[str, Whole] = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
    "output_layer.weight": Vocabulary("lm_head.weight"),
    "decoder.final_layernorm.weight": Whole("model.norm.weight"),
    f"{LAYER}.input_layernorm.weight": Whole(f"{HF}.input_layernorm.weight"),
    f"{LAYER}.self_attention.linear_qkv.weight": QKV({name: f"{HF}.self_attn.{name}_proj.weight" for name in "qkv"}),
    f"{LAYER}.self_attention.q_layernorm.weight": Centered(f"{HF}.self_attn.q_norm.weight"),
    f"{LAYER}.self_attention.k_layernorm.weight": Centered(f"{HF}.self_attn.k_norm.weight"),
    f"{LAYER}.self_attention.linear_proj.weight": Columns(f"{HF}.self_attn.o_proj.weight"),
    f"{LAYER}.pre_mlp_layernorm.weight": Whole(f"{HF}.post_attention_layernorm.weight"),
    f"{LAYER}.mlp.linear_fc1.weight": Gated(gated(f"{HF}.mlp")),
    f"{LAYER}.mlp.linear_fc2.weight": Columns(f"{HF}.mlp.down_proj.weight"),
    f"{LAYER}.mlp.router.weight": Whole(f"{HF}.mlp.gate.weight"),
    f"{LAYER}.mlp.router.expert_bias": Whole(f"{HF}.mlp.gate.e_score_correction_bias"),
    f"{EXPERT}.linear_fc1.weight": Gated(gated(f"{HF}.mlp.experts.*"), is_expert=True),
    f"{EXPERT}.linear_fc2.weight": Columns(f"{HF}.mlp.experts.*.down_proj.weight", is_expert=True),
    f"{LAYER}.mlp.shared_experts.linear_fc1.weight": Gated(gated(f"{HF}.mlp.shared_experts")),
    f"{LAYER}.mlp.shared_experts.linear_fc2.weight": Columns(f"{HF}.mlp.shared_experts.down_proj.weight"),
}


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass
class Provider(TransformerConfig):  # type: ignore[misc]
    transformer_layer_spec: Any = torch_layers
    share_embeddings_and_output_weights: bool = True
    position_embedding_type: str = "rope"
    vocab_size: int = 0
    gpt: Mapping[str, Any] = field(default_factory=dict)  # further arguments of GPTModel
    head: type | None = None  # another class of the head
    _pg_collection: Any = None

    def __post_init__(self) -> None:
        """Nothing is checked or derived until `finalize`."""

    def finalize(self) -> None:
        super().__post_init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Provider:
        """megatron-core copies the config for its experts, and process groups cannot be."""
        return copy.copy(self)

    def provide(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        model = GPTModel(
            config=self,
            transformer_layer_spec=self.transformer_layer_spec(self, vp_stage=vp_stage),
            vocab_size=self.vocab_size,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type=self.position_embedding_type,
            pg_collection=self._pg_collection,
            vp_stage=vp_stage,
            **self.gpt,
        )
        for layer in model.decoder.layers:
            layer.self_attention.q_layernorm.zero_centered_gamma = True
            layer.self_attention.k_layernorm.zero_centered_gamma = True
        if post_process and self.head:
            model.output_layer.__class__ = self.head
        return model


def provider_of(config: PreTrainedConfig, **changed: Any) -> Provider:
    known = architecture(config.to_dict(), value_head=False)
    gpt = dict(known.gpt)
    taken = {each.name: gpt.pop(each.name) for each in fields(Provider) if each.name in gpt}
    return Provider(
        **{
            **known.transformer,
            **taken,
            "activation_func": ACTIVATIONS[known.activation],
            "moe_router_enable_expert_bias": known.choice_bias,
            "gpt": gpt,
            **changed,
        }
    )


# ---- what the plugin asks --------------------------------------------------------------------------------------------


@frozen
class Registry:
    mappings: Mapping[str, Whole | None]

    def megatron_to_hf_lookup(self, name: str) -> Whole | None:
        for pattern, mapping in self.mappings.items():
            found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
            if found and mapping:
                return evolve(mapping, hf_param=_numbered(mapping.hf_param, found.groups()))
        return None


def _numbered(names: Any, numbers: Sequence[str]) -> Any:
    if isinstance(names, dict):
        return {key: _numbered(name, numbers) for key, name in names.items()}
    for number in numbers:
        names = names.replace("*", number, 1)
    return names


@frozen
class ModelBridge:
    mappings: Mapping[str, Whole | None]

    def mapping_registry(self) -> Registry:
        return Registry(self.mappings)

    def maybe_modify_loaded_hf_weight(self, hf_param: Any, tensors: Mapping[str, Tensor]) -> Any:
        return (
            tensors[hf_param] if isinstance(hf_param, str) else {key: tensors[name] for key, name in hf_param.items()}
        )

    def build_conversion_tasks(self, files: Any, modules: Sequence[Any]) -> list[Any]:
        """One for each parameter and stored buffer that has a mapping, whose tensors are in the files; None in the
        place of others."""
        known = files.state.source.get_all_keys()
        tasks: list[Any] = []
        for module in modules:
            for name, tensor in chain(module.named_parameters(), stored_buffers(module).items()):
                in_model = _in_whole_model(module, name)
                mapping = self.mapping_registry().megatron_to_hf_lookup(in_model)
                names = mapping.hf_param if mapping else ""
                if not mapping or any(
                    each not in known for each in ([names] if names is str(names) else names.values())
                ):
                    tasks.append(None)
                    continue
                tasks.append(
                    SimpleNamespace(
                        global_param_name=in_model,
                        mapping=mapping,
                        megatron_module=module.get_submodule(name.rpartition(".")[0]),
                        param_weight=tensor,
                    )
                )
        return tasks


def _in_whole_model(module: Any, name: str) -> str:
    """The name of a rank's parameter with its layer's and its expert's number in the whole model."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(module.decoder.layers[int(parts[at])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        here = module.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        parts[at] = str(parallel_state.get_expert_model_parallel_rank() * here + int(parts[at]))
    return ".".join(parts)


@contextmanager
def bridge_installed(
    mappings: Mapping[str, Whole | None] = MAPPINGS, provider: Callable[[PreTrainedConfig], Any] = provider_of
) -> Iterator[None]:
    """Within the block, `megatron.bridge` is this, with these mappings, None for one that it lacks."""

    def from_hf_config(config: PreTrainedConfig) -> Any:
        if config.architectures != ["Glm4MoeForCausalLM"]:
            raise ValueError(f"No bridge for {config.architectures}")
        return SimpleNamespace(
            to_megatron_provider=lambda load_weights: provider(config), _model_bridge=ModelBridge(mappings)
        )

    module: Any = ModuleType("megatron.bridge")
    module.AutoBridge = SimpleNamespace(from_hf_config=from_hf_config)
    with mock.patch.dict(sys.modules, {"megatron.bridge": module}):
        yield
