"""Build models by Megatron-Bridge, for families that are not in the plugin's own table, and learn from its mappings
which boxes of which Hugging Face tensors their parameters are.

Nothing else of it is used: weights are read, sent and saved by CoreRL, from those boxes.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from transformers import PreTrainedConfig

from corerl.config import RoleConfig
from corerl.errors import ModelError, PluginError
from corerl.messages import listed, one_line
from corerl.models import VALUE_HEAD_WEIGHT, architecture_of, meta_model, reads_pictures, shapes_of, stored_buffers
from corerl.weights import all_gather_json
from corerl_megatron.boxes import Traced, trace
from corerl_megatron.chunks import Held, Piece, vocabulary_pieces
from corerl_megatron.families import BRIDGE_INSTALL, NO_SOFTMAX
from corerl_megatron.layers import add_choice_bias
from corerl_megatron.model import EMBEDDING, HEAD, PackedModel, padded_vocabulary, settings, uses_transformer_engine
from corerl_megatron.parallel import Groups

Shape: TypeAlias = tuple[int, ...]
NUMBER = re.compile(r"\d+")
SHOWN = 3  # tensors that an error names
# Of every model: what CoreRL does itself, or does not do.
WITHOUT = {
    "fp16": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mtp_num_layers": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,  # its own rule would change it in each step
    "moe_router_fusion": False,  # which could not be asked for its choice
    "moe_shared_expert_overlap": False,
    "moe_router_dtype": "fp32",
}


@frozen(kw_only=True, eq=False)
class Bridged:
    """A model of Megatron-Bridge's."""

    config: PreTrainedConfig
    bridge: Any  # a MegatronModelBridge: its mappings
    provider: Any  # a TransformerConfig that builds models
    shapes: Mapping[str, Shape]  # of all Hugging Face tensors of the model
    vocabulary: int
    padding: int | None  # the token whose embedding is not trained as an input
    tied: bool
    choice_bias: bool  # whether routers have a bias by which they choose experts without weighing them

    @classmethod
    def of(cls, config: PreTrainedConfig, *, value_head: bool) -> Bridged:
        """Raises PluginError if Megatron-Bridge cannot be imported, ModelError if it does not know the model."""
        try:
            from megatron.bridge import AutoBridge
        except ImportError as error:
            raise PluginError(
                f"backends.megatron.bridge=true, but megatron-bridge cannot be imported ({one_line(error)}); "
                f"{BRIDGE_INSTALL}"
            ) from error
        if reads_pictures(config):
            raise ModelError(
                f"Megatron-Bridge builds a {architecture_of(config).__name__} with its vision tower, which numbers and "
                "packs tokens in its own way, while this backend trains text decoders alone; use another backend"
            )
        model = meta_model(config, value_head=value_head)
        config = copy.deepcopy(config)
        config.architectures = [architecture_of(config).__name__]  # whatever else the checkpoint may have
        try:
            auto = AutoBridge.from_hf_config(config)
            provider = auto.to_megatron_provider(load_weights=False)
            bridge = auto._model_bridge  # the only way to its mappings without a checkpoint
        except ValueError as error:
            raise ModelError(
                f"Megatron-Bridge cannot build a {config.model_type} model ({one_line(error)}); use another backend"
            ) from error
        if not hasattr(provider, "transformer_layer_spec"):
            raise ModelError(
                f"Megatron-Bridge builds a {config.model_type} model by a {type(provider).__name__}, of whose layers "
                "some take no packed sequences here, wanted a GPTModelProvider; use another backend"
            )
        embedding: Any = model.get_input_embeddings()
        return cls(
            config=config,
            bridge=bridge,
            provider=provider,
            shapes=shapes_of(model),
            vocabulary=embedding.num_embeddings,
            padding=embedding.padding_idx,
            tied=bool(provider.share_embeddings_and_output_weights) and not value_head,
            choice_bias=bool(provider.moe_router_enable_expert_bias),
        )

    def stages(self, role: RoleConfig, *, device: torch.device) -> list[PackedModel]:
        """This rank's stage, or its interleaved parts in order. Called inside `calling_megatron`, after
        `make_groups`."""
        options, provider = role.options, self.provider
        engine = uses_transformer_engine(options, role.train.precision, device)
        sigmoid = provider.num_moe_experts and provider.moe_router_score_function != "softmax"
        if (coef := role.train.aux_loss_coef) and sigmoid:
            raise ModelError(f"train.aux_loss_coef={coef:g}, but {NO_SOFTMAX.format(self.config.model_type)}")
        sparse, count = provider.moe_layer_freq, provider.num_layers
        changed = {
            **settings(role, experts=bool(provider.num_moe_experts), engine=engine, device=device),
            **WITHOUT,
            "apply_rope_fusion": engine and provider.position_embedding_type == "rope" and not self._latent,
            "moe_layer_freq": sparse if isinstance(sparse, list) else [int(n % sparse == 0) for n in range(count)],
            "share_embeddings_and_output_weights": self.tied,
            "vocab_size": padded_vocabulary(self.vocabulary, options.tensor_parallel),
        }
        for name, value in changed.items():
            setattr(provider, name, value)
        provider.finalize()
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        virtual = options.virtual_pipeline
        parts: list[int | None] = list(range(virtual)) if virtual > 1 else [None]
        return [self._stage(part, critic=role.value_head).to(device) for part in parts]

    @property
    def _latent(self) -> bool:
        return bool(getattr(self.provider, "multi_latent_attention", False))

    def _stage(self, stage: int | None, *, critic: bool) -> PackedModel:
        at: Mapping[str, Any] = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
        last = parallel_state.is_pipeline_last_stage(**at)
        first = parallel_state.is_pipeline_first_stage(**at)
        try:
            module = _packed(self.provider.provide(pre_process=first, post_process=last, vp_stage=stage))
        except ImportError as error:  # layers of some families need libraries of their own
            raise PluginError(
                f"Megatron-Bridge needs a library for {self.config.model_type} models ({one_line(error)}); install it"
            ) from error
        if self.choice_bias:
            for router in (each for each in module.modules() if isinstance(each, TopKRouter)):
                add_choice_bias(router)
        if critic and last:
            module.become_critic()
        if module.pre_process and self.padding is not None:
            module.leave_out(self.padding)
        return module

    def held(self, modules: Sequence[PackedModel], groups: Groups) -> tuple[list[Held], list[Held]]:
        """Every parameter of this rank, and every stored buffer, with the Hugging Face tensors in it. Called on every
        rank; raises ModelError, on all ranks alike, for what is no box of them."""
        params = [(name, param) for module in modules for name, param in module.named_parameters()]
        buffers = [(name, buffer) for module in modules for name, buffer in stored_buffers(module).items()]
        tasks = self._tasks(modules)
        found: list[_Found] = []
        faults: list[str] = []
        known: dict[Any, tuple[list[str], Traced]] = {}
        with _in_float64([tensor for _, tensor in [*params, *buffers]]):
            for name, tensor in [*params, *buffers]:
                try:
                    found.append(self._find(name, tensor, tasks.get(id(tensor)), groups, known))
                except ModelError as error:  # ranks that share this parameter still exchange others with this one
                    faults.append(error.message)
        self._agree(found, faults)
        dense = _split([each for each in found if not each.expert], groups.tensor)
        experts = _split([each for each in found if each.expert], groups.expert_tensor)
        held = [
            Held(
                param=each.tensor,
                pieces=each.pieces,
                expert=each.expert,
                split=split,
                later_copy=not (groups.first_expert_copy if each.expert else groups.first_copy),
                duplicate=each.copy or duplicate,
            )
            for each in found
            for split, duplicate in [(experts if each.expert else dense)[id(each.tensor)]]
        ]
        return held[: len(params)], held[len(params) :]

    def _tasks(self, modules: Sequence[PackedModel]) -> dict[int, Any]:
        """Of each parameter and buffer, by identity: what Megatron-Bridge would do to load it."""
        source = SimpleNamespace(get_all_keys=lambda: _Names(self.shapes))
        files = SimpleNamespace(config=self.config, state=SimpleNamespace(source=source))
        tasks = self.bridge.build_conversion_tasks(files, list(modules))
        return {id(task.param_weight): task for task in tasks if task is not None and task.param_weight is not None}

    def _find(
        self, name: str, tensor: Tensor, task: Any, groups: Groups, known: dict[Any, tuple[list[str], Traced]]
    ) -> _Found:
        if name == VALUE_HEAD_WEIGHT:
            return _Found(tensor=tensor, pieces=[Piece.of(name, tuple(tensor.shape), 0, 0, tuple(tensor.shape))])
        if name == HEAD and self.tied:  # on the last stage; the first holds the embedding
            mapping = self.bridge.mapping_registry().megatron_to_hf_lookup(EMBEDDING)
            pieces = vocabulary_pieces(mapping.hf_param, tuple(tensor.shape), self.vocabulary, groups.tensor.rank())
            return _Found(tensor=tensor, pieces=list(pieces), copy=True)
        if task is None:
            raise ModelError(
                f"Megatron-Bridge maps no Hugging Face tensor of a {self.config.model_type} model to megatron-core's "
                f"{name!r}; use another backend"
            )
        mapping, module = task.mapping, task.megatron_module
        names = [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())
        absent = sorted(set(names) - self.shapes.keys())
        if absent and not mapping.allow_hf_name_mismatch:
            raise ModelError(
                f"Megatron-Bridge's {self.config.model_type} model has a {task.global_param_name!r}, of Hugging Face's "
                f"{absent[0]!r}, which a model of this config lacks: its layers are of other kinds than "
                "Megatron-Bridge builds; use another backend"
            )
        # A number that is not in the names of tensors, such as an expert's, may choose a part of one.
        numbers = Counter(NUMBER.findall(task.global_param_name)) - Counter(NUMBER.findall(names[0]))
        of_tensors = tuple(self.shapes.get(each) for each in names)
        key = NUMBER.sub("", name), type(module), tuple(tensor.shape), tuple(sorted(numbers.elements())), of_tensors
        if key in known:
            before, traced = known[key]
            renamed = dict(zip(before, names, strict=True))
            traced = evolve(traced, pieces=[evolve(piece, name=renamed[piece.name]) for piece in traced.pieces])
        else:
            traced = self._trace(tensor, mapping, module, names)
            if {piece.name for piece in traced.pieces} <= set(names):
                known[key] = names, traced
        if traced.less:
            # The norm is centered at 1 here and at 0 in Hugging Face's model, so take it from there as it is.
            if not getattr(module, "zero_centered_gamma", False):
                raise ModelError(f"{_of(mapping, names)} subtracts 1 from its values, and is not of a norm at 1")
            module.zero_centered_gamma = False
        return _Found(tensor=tensor, pieces=traced.pieces, expert=bool(mapping.is_expert))

    def _trace(self, tensor: Tensor, mapping: Any, module: nn.Module, names: Sequence[str]) -> Traced:
        def loaded(tensors: Mapping[str, Tensor]) -> Tensor:
            weights = self.bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, tensors)
            result: Tensor = mapping.hf_to_megatron(weights, module)
            return result

        try:
            return trace(loaded, self.shapes, tuple(tensor.shape), device=tensor.device)
        except ModelError as error:
            raise ModelError(f"{_of(mapping, names)} cannot be told as boxes: {error.message}") from error
        except Exception as error:  # whatever a library's code raises for what it was not made for
            raise ModelError(f"{_of(mapping, names)} cannot be read ({one_line(error)})") from error

    def _agree(self, found: Sequence[_Found], faults: Sequence[str]) -> None:
        """Raise the first fault of any rank on every rank, or ModelError if no rank holds a tensor of the model."""
        names = sorted({piece.name for each in found for piece in each.pieces})
        ranks = all_gather_json([list(faults[:1]), names])
        for fault, _ in ranks:
            if fault:
                raise ModelError(fault[0])
        missing = sorted(self.shapes.keys() - {name for _, names in ranks for name in names})
        if missing:
            raise ModelError(
                f"Megatron-Bridge's {self.config.model_type} model has no parameter for Hugging Face's "
                f"{listed(missing, SHOWN)}; use another backend"
            )


class _Names(list[str]):
    """Names of tensors, which Megatron-Bridge leaves out of its tasks where it does not find them among these; so it
    finds any, and `Bridged` tells which one the model lacks."""

    def __contains__(self, name: object) -> bool:
        return True


def _of(mapping: Any, names: Sequence[str]) -> str:
    return f"Megatron-Bridge's {type(mapping).__name__} of {', '.join(names)}"


@frozen(kw_only=True, eq=False)
class _Found:
    tensor: Tensor
    pieces: Sequence[Piece]
    expert: bool = False
    copy: bool = False  # of what another stage holds


def _packed(module: nn.Module) -> PackedModel:
    """The same module as one that returns hidden states. Raises ModelError if more than a matrix follows them."""
    kind = type(module)
    if not isinstance(module, GPTModel):
        raise ModelError(
            f"Megatron-Bridge builds a {kind.__name__}, of which this backend cannot take hidden states, wanted a "
            "GPTModel; use another backend"
        )
    head = getattr(module, "output_layer", None)
    if head is not None and (type(head) is not ColumnParallelLinear or head.bias is not None):
        raise ModelError(
            f"Megatron-Bridge computes logits by a {type(head).__name__}{' with a bias' * (head.bias is not None)}, "
            "wanted one matrix, from which this backend computes log-probs without them; use another backend"
        )
    module.__class__ = PackedModel if kind is GPTModel else type(kind.__name__, (PackedModel, kind), {})
    assert isinstance(module, PackedModel)
    return module


@contextmanager
def _in_float64(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, the tensors have no memory and say float64, the type that mappings then convert to."""
    kept = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = torch.zeros((), dtype=torch.float64, device=tensor.device).expand(tensor.shape)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data


def _split(found: Sequence[_Found], group: torch.distributed.ProcessGroup) -> dict[int, tuple[int | None, bool]]:
    """For each tensor, by identity: the dim in which the ranks of a tensor-parallel group split it, or None if each has
    the whole; and whether an earlier rank has the same boxes."""
    boxes = [[[piece.name, list(piece.offsets), list(piece.sizes)] for piece in each.pieces] for each in found]
    ranks = all_gather_json(boxes, group) if group.size() > 1 else [boxes]
    rank, split = group.rank(), {}
    for index, each in enumerate(found):
        held = [boxes[index] for boxes in ranks]
        duplicate = held[rank] in held[:rank]
        whole = all(same == held[0] for same in held)
        split[id(each.tensor)] = None if whole else _split_dim(each, held[0], held[1]), duplicate
    return split


def _split_dim(found: _Found, one: Any, other: Any) -> int:
    """The parameter's dim along which two ranks' boxes differ."""
    if not one or not other or one[0][0] != other[0][0]:
        return 0
    axes = found.pieces[0].axes
    return next((dim for a, b, dim in zip(one[0][1], other[0][1], axes, strict=True) if a != b and dim is not None), 0)
