"""Predict what a role's ranks need on their devices, before there is any device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import evolve, frozen
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.config import ClusterInfo
from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models import shapes_of_tower, size_of
from corerl.plugin import BackendSpec, RankMemory
from corerl.types import MemoryKind, Output
from corerl_forecast.activations import activations_of


def with_tower(
    kinds: Mapping[MemoryKind, int], config: PreTrainedConfig, *, trained: bool, precision: str
) -> dict[MemoryKind, int]:
    """The bytes of each kind with those of a whole tower: in `precision` if it is frozen, else in float32 with
    gradients and two moments."""
    count = sum(map(math.prod, shapes_of_tower(config).values()))
    own = {MemoryKind.PARAM: count * (4 if trained or precision == "float32" else 2)}
    if trained:
        own |= {MemoryKind.GRAD: 4 * count, MemoryKind.OPTIMIZER: 8 * count}
    return {kind: held + own.get(kind, 0) for kind, held in kinds.items()}


@frozen(kw_only=True)
class RoleMemory:
    """Bytes that the fullest rank of a role needs on its device, beside what its process takes before it builds."""

    rank: RankMemory
    forward: int  # activations at the peak of a pass without gradients
    kept: int  # activations when the backward pass begins with the last layer
    train: int  # activations at the peak of a forward and backward pass
    single: bool  # whether a step has a single micro-batch

    @property
    def passing(self) -> int:
        """In a pass without gradients, with nothing but the parameters resident."""
        return self.rank.kinds[MemoryKind.PARAM] + self.rank.gathered + self.forward

    @property
    def training(self) -> int:
        """In an optimizer step."""
        activations = max(self.train, self.kept + self.rank.reducing)
        gradients = self.rank.kinds[MemoryKind.GRAD]
        held = sum(self.rank.kinds.values()) - gradients + self.rank.gathered
        if self.single and self.rank.gradients_grow:
            return held + max(activations, gradients)
        return held + gradients + activations


def role_memory(
    spec: BackendSpec,
    options: Any,
    cluster: ClusterInfo,
    config: PreTrainedConfig,
    model: PreTrainedModel,
    *,
    outputs: Sequence[Output],
    longest: int,
    single: bool = False,
    tower: Literal["", "frozen", "trained"] = "",
) -> RoleMemory | None:
    """The memory of a role with the model of `config`, here on meta, and `cluster.train`: micro-batches are full of
    sequences of `longest` tokens, and `single` says whether a step never has a second one. Rows with pictures take a
    `tower`, which each rank has whole; what it makes of pictures is not counted. None if the backend cannot tell.
    Raises ModelError if the model's code asks for values, which tensors on meta do not have."""
    if spec.memory is None or cluster.train is None:
        return None
    train = cluster.train
    rank = spec.memory(options, cluster, size_of(model))
    if cluster.frozen:
        rank = evolve(rank, kinds={MemoryKind.PARAM: rank.kinds[MemoryKind.PARAM]})
    if tower:
        rank = evolve(rank, kinds=with_tower(rank.kinds, config, trained=tower == "trained", precision=train.precision))
    try:
        whole = activations_of(
            config,
            tokens=max(train.tokens_per_micro_batch, longest),  # a longer sample is a micro-batch of its own
            longest=longest,
            precision=train.precision,
            outputs=outputs,
            layout=train.layout,
            recompute=train.recompute == "full",
            fused=rank.fused,
        )
    except Exception as error:  # whatever a model's code does without values
        raise ModelError(f"its model cannot be run without a device ({one_line(error)})") from error
    return RoleMemory(
        rank=rank,
        forward=math.ceil(whole.forward * rank.activations),
        kept=math.ceil(whole.kept * rank.activations) + rank.replicated,
        train=math.ceil(whole.train * rank.activations) + rank.replicated,
        single=single,
    )
