"""Build megatron-core's model with its gradient buffers and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from attrs import frozen
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from corerl.config import RoleConfig
from corerl_megatron.adam import fused_adam
from corerl_megatron.chunks import Held, held_buffers, held_parameters
from corerl_megatron.config import MegatronConfig
from corerl_megatron.families import Architecture
from corerl_megatron.lora import put_adapters, targets_of
from corerl_megatron.model import PackedModel, stages
from corerl_megatron.parallel import Groups


@frozen(eq=False)
class Model:
    """This rank's part of the model."""

    modules: Sequence[PackedModel]  # several if stages are interleaved
    chunks: Sequence[Any]  # each in a DistributedDataParallel; in a frozen role the modules themselves
    held: Sequence[Held]  # all of their parameters
    buffers: Sequence[Held]  # all of their stored buffers
    # A megatron-core ChainedOptimizer: one for dense parameters, one for experts; None if the role is frozen.
    optimizer: Any
    config: TransformerConfig


class Source(Protocol):
    """Where a model's modules come from, and what their parameters are. Both methods are called on every rank, inside
    `calling_megatron`."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, without padding."""

    def stages(self, role: RoleConfig, *, device: torch.device) -> list[PackedModel]:
        """This rank's stage, or its interleaved parts in order."""

    def held(self, modules: Sequence[PackedModel], groups: Groups) -> tuple[list[Held], list[Held]]:
        """This rank's parameters and its stored buffers, with the Hugging Face tensors in them."""


@frozen
class Table:
    """The plugin's own: a family of its table."""

    architecture: Architecture

    @property
    def vocabulary(self) -> int:
        return self.architecture.vocabulary

    def stages(self, role: RoleConfig, *, device: torch.device) -> list[PackedModel]:
        return stages(role, self.architecture, device=device)

    def held(self, modules: Sequence[PackedModel], groups: Groups) -> tuple[list[Held], list[Held]]:
        return held_parameters(modules, self.architecture, groups), held_buffers(modules, self.architecture, groups)


def build(role: RoleConfig, source: Source, groups: Groups, *, device: torch.device) -> Model:
    """Build this rank's part of the model. Called on every rank, inside `calling_megatron`."""
    options: MegatronConfig = role.options
    model_parallel_cuda_manual_seed(role.seed)
    modules = source.stages(role, device=device)
    config = modules[0].config
    held, buffers = source.held(modules, groups)
    if role.lora is not None:
        held += put_adapters(modules, held, role.lora, targets_of(role), groups)
    if role.frozen:
        for part in held:
            part.zero_padding()
        return Model(modules=modules, chunks=modules, held=held, buffers=buffers, optimizer=None, config=config)
    for part in held:
        if options.distributed_optimizer and part.param.requires_grad:
            # It moves parameters into buffers; until then they take no memory, to avoid holding them twice.
            part.param.data = torch.zeros((), dtype=part.param.dtype, device=device).expand(part.param.shape)
        else:
            part.zero_padding()  # no box reads or writes it, and it has no gradient, so it stays zero
        of_other_ranks = part.expert and config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        if of_other_ranks:
            # megatron-core 0.16 takes them for dense ones unless there is expert parallelism, and so does not reduce
            # them over the ranks that split those; and it sums the gradients of biases over these ranks, although
            # they belong to different experts, or have been summed.
            part.param.allreduce = False  # type: ignore[attr-defined]
            part.param.sequence_parallel = False  # type: ignore[attr-defined]
        if (of_other_ranks or part.split is not None) and not hasattr(part.param, "tensor_model_parallel"):
            # megatron-core sets these when it initializes weights; without them the norm would count one rank's share.
            set_tensor_model_parallel_attributes(part.param, is_parallel=True, dim=part.split or 0, stride=1)
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        bucket_size=options.bucket or None,
    )
    chunks = [
        DistributedDataParallel(
            config,
            reduction,
            module,
            # Of interleaved parts, only the first is waited for while its gradients are reduced.
            disable_bucketing=index > 0,
        )
        for index, module in enumerate(modules)
    ]
    with fused_adam():
        optimizer = get_megatron_optimizer(_optimizer_config(role), chunks, use_gloo_process_groups=False)
    _connect(config, chunks, options)
    return Model(modules=modules, chunks=chunks, held=held, buffers=buffers, optimizer=optimizer, config=config)


@contextmanager
def scheduled(model: Model, *, first: bool, last: bool) -> Iterator[None]:
    """Within the block, schedules gather parameters only for a step's `first` call, since none changes after it, and
    reduce gradients only for its `last`: in place, so once a step; see `reduce_gradients`."""
    without = [] if first else ["param_sync_func"]
    if not last:
        without += ["no_sync_func", "grad_sync_func", "finalize_model_grads_func"]
    with ExitStack() as stack:
        for name in without:
            stack.enter_context(mock.patch.object(model.config, name, None))
        for chunk in () if last else model.chunks:
            stack.enter_context(chunk.no_sync())
        yield


def reduce_gradients(model: Model) -> None:
    """Reduce the gradients of a step that had no `last` call. Called on every rank, inside `calling_megatron`."""
    for chunk in model.chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()  # otherwise the backward pass would have
    model.config.finalize_model_grads_func(list(model.chunks))


def take_apart(model: Model) -> None:
    """Let go of the modules. Routers keep the last pass's probabilities, and with them its graph, whose leaves have
    hooks that hold the model: a cycle that Python's collector does not see."""
    for chunk in model.chunks:
        vars(chunk).clear()


def _optimizer_config(role: RoleConfig) -> MegatronOptimizerConfig:
    optimizer, precision = role.train.optimizer, role.train.precision
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        bf16=precision == "bfloat16",
        params_dtype=getattr(torch, precision),
        use_distributed_optimizer=role.options.distributed_optimizer,
        overlap_param_gather=role.options.overlap_param_gather,
    )


def _connect(config: TransformerConfig, chunks: Sequence[DistributedDataParallel], options: MegatronConfig) -> None:
    """Set what the pipeline schedules look up on the model's config."""

    def finalize(model: list[nn.Module], num_tokens: Tensor | None = None, **others: Any) -> None:
        # Gradients are sums over micro-batches and ranks: there is no number of tokens to divide by.
        finalize_model_grads(model, None, **others)

    config.finalize_model_grads_func = finalize
    if options.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        if options.virtual_pipeline > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if options.overlap_param_gather and options.virtual_pipeline > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
