"""Build a transformers model under DeepSpeed's engine: each rank allocates its share of parameters, unloaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch
from attrs import frozen
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from transformers import PretrainedConfig

from corerl.backend import adamw
from corerl.config import LoraConfig, TrainConfig
from corerl.models import (
    HFBox,
    Policy,
    hf_boxes,
    make_policy,
    materialize,
    meta_model,
    move_buffers,
    put_adapters,
    recompute_layers,
    trained_parameters,
    unread_parameters,
)
from corerl.pictures import PictureInputs
from corerl_deepspeed.config import DeepSpeedConfig
from corerl_deepspeed.gradients import GradientWatch
from corerl_deepspeed.settings import deepspeed_json


@frozen(kw_only=True)
class Model:
    policy: Policy
    engine: Any  # a DeepSpeedEngine; the policy itself where DeepSpeed has nothing to shard
    optimizer: torch.optim.AdamW | None  # inside the engine's own optimizer; None if the role is frozen
    boxes: dict[str, list[HFBox]]  # by parameter name
    trains: Set[str]  # names of the parameters that have masters
    watch: GradientWatch | None  # None if the role is frozen


def build_model(
    hf: PretrainedConfig,
    *,
    value_head: bool,
    vocabulary: int,
    frozen: bool,
    lora: LoraConfig | None,
    train: TrainConfig,
    options: DeepSpeedConfig,
    device: torch.device,
    pictures: PictureInputs | None = None,
) -> Model:
    """A policy, or a critic with `value_head`, in `train.precision` with float32 masters of what is trained: nothing if
    it is `frozen`, else what `lora` says. The tower that encodes `pictures` is left as it is: on meta, and DeepSpeed
    does not know it. Called on every rank."""
    dtype = getattr(torch, train.precision)
    policy = make_policy(
        hf, dtype=dtype, layout=train.layout, value_head=value_head, vocabulary=vocabulary, pictures=pictures
    )
    if lora is not None:
        put_adapters(policy.model, lora, dtype=dtype)
    boxes = hf_boxes(policy.model)
    trains = trained_parameters(policy.model).keys()
    if train.recompute == "full":
        recompute_layers(policy.model)
    shapes = {name: tuple(param.shape) for name, param in policy.model.named_parameters()}
    # DeepSpeed steps every parameter it gets: these have no gradient, and must not decay.
    untrained = {name for name, param in policy.model.named_parameters() if not param.requires_grad}
    untrained |= unread_parameters(meta_model(hf, value_head=value_head, lora=lora))
    settings = deepspeed_json(
        options,
        train,
        device=device.type,
        elements=sum(param.numel() for param in policy.parameters()),
        trained=sum(param.numel() for param in trained_parameters(policy.model).values()),
        # Norms and biases: gathering one takes as long as gathering a matrix, and keeping it costs almost nothing.
        persistent=max((param.numel() for param in policy.parameters() if param.dim() < 2), default=0),
        frozen=frozen,
    )
    alone = frozen and options.stage < 3  # every rank has the whole model, and there is no optimizer to shard
    # DeepSpeed gives memory to the parameters that it steps and, in stage 3, to all.
    kept = {name for name in shapes if alone or (options.stage < 3 and name not in trains)}
    materialize(
        policy.model,
        {name: (whole if name in kept else unallocated)(shape, dtype, device) for name, shape in shapes.items()},
    )
    move_buffers(policy, device)
    if alone:
        return Model(policy=policy, engine=policy, optimizer=None, boxes=boxes, trains=frozenset(), watch=None)
    optimizer = watch = None
    if not frozen:
        optimizer = adamw(
            trained_parameters(policy.model),
            shapes,
            train.optimizer,
            fused=device.type == "cuda" or options.offload != "none",
            frozen=untrained,
        )
    if options.stage == 3:
        partition(policy.model.parameters(), settings)
    with nothing_to_copy(), always_zero():
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings, dist_init_required=False)
    if options.stage == 3:
        # The policy's own forward reads them, but they belong to other modules.
        for param in policy.head_parameters:
            deepspeed.zero.register_external_parameter(policy, param)
    if not frozen:
        watch = GradientWatch(trained_parameters(policy.model), options)
    return Model(policy=policy, engine=engine, optimizer=optimizer, boxes=boxes, trains=trains, watch=watch)


def whole(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def unallocated(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter of that shape with memory for one element."""
    return nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(shape))


def partition(params: Iterable[Any], settings: dict[str, Any]) -> None:
    """Give each rank its share of every still empty parameter; only one parameter is whole at a time."""
    # Used as a context manager, Init would patch torch and model classes, and send rank 0's values to the others.
    init = deepspeed.zero.Init(config_dict_or_path=settings)
    for param in params:
        init._convert_to_deepspeed_param(param)
        param.partition()


@contextmanager
def always_zero() -> Iterator[None]:
    """Use the ZeRO optimizer in stage 1 too. With bfloat16 weights and float32 gradients DeepSpeed would take another,
    which keeps its state elsewhere (https://github.com/deepspeedai/DeepSpeed/pull/2706) but does the same."""
    with mock.patch.object(DeepSpeedEngine, "_do_optimizer_sanity_check", return_value=ZERO_OPTIMIZATION):
        yield


@contextmanager
def nothing_to_copy() -> Iterator[None]:
    """Skip work on parameters that are still empty: rank 0 does not broadcast them, stages 1 and 2 allocate flat memory
    instead of concatenating copies, and no gradients are made that would be dropped at once. These would briefly take
    memory that a rank may not have, and later allocations in the gradients' place would keep torch from returning it to
    the device."""
    make_gradients = DeepSpeedZeroOptimizer.initialize_optimizer_states
    make_shares = DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states

    def allocate(
        self: Any, params: Sequence[Any], alignment: int, use_cpu_data: bool = False, param_padding: Any = None
    ) -> torch.Tensor:
        tensors = [param.cpu_data for param in params] if use_cpu_data else params
        numel = sum(tensor.numel() for tensor in tensors) + sum(param_padding or ())
        return torch.zeros(math.ceil(numel / alignment) * alignment, dtype=tensors[0].dtype, device=tensors[0].device)

    def gradients(self: Any) -> None:
        if self.cpu_offload:  # these gradients are kept
            make_gradients(self)

    def shares(self: Any) -> None:
        if self.offload_optimizer:  # these too
            make_shares(self)

    with (
        mock.patch.object(DeepSpeedEngine, "_broadcast_model", return_value=None),
        mock.patch.object(DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", allocate),
        mock.patch.object(DeepSpeedZeroOptimizer, "initialize_optimizer_states", gradients),
        mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "initialize_optimizer_states", shares),
    ):
        yield
