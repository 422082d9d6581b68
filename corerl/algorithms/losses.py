"""Policy losses as pure functions of per-token tensors; each is a plain weighted sum, its normalisation is in the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

from corerl.types import Reduction, Scalar

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class LossInputs:
    """What the model and the batch say of T packed tokens."""

    logprobs: Tensor  # [T] with gradient
    entropy: Tensor | None = None  # [T] with gradient, where asked for
    values: Tensor | None = None  # [T] with gradient, where asked for
    columns: Mapping[str, Tensor] = field(factory=dict)  # each [T]: weights, advantages, old_logprobs, ...


@frozen
class TensorMetric:
    """A metric that has not left the device yet; see corerl.types.Metric."""

    total: Tensor  # 0-d
    weight: Tensor  # 0-d
    reduction: Reduction = Reduction.MEAN


@frozen
class LossResult:
    loss: Tensor  # 0-d, sum over tokens
    metrics: Mapping[str, TensorMetric] = field(factory=dict)


class Loss(Protocol):
    def __call__(self, inputs: LossInputs, **params: Scalar) -> LossResult: ...
