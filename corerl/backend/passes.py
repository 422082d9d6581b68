"""The passes over a step's micro-batches, for backends in which each rank calls a model and gets whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from corerl.algorithms.metrics import MetricSum
from corerl.algorithms.registry import resolve_loss
from corerl.backend.batches import DeviceBatch, OutputCollector, to_device
from corerl.backend.routing import told_experts
from corerl.models.routing import Routers
from corerl.types import ForwardResult, LossSpec, MicroBatch, Output, PackedBatch

# (tokens [T], packing, positions [T], temperature, wanted) -> each [T]; a CausalPolicy, and whatever wraps one.
Model = Callable[..., Mapping[Output, Tensor]]


class StepLosses:
    """The loss of each micro-batch in turn, for a backward pass before the next is asked for, and what they came to.

    The tokens' weights already hold 1 / denominator of the whole step: a sum over micro-batches and ranks is the step's
    loss, and an average that a library takes must be undone. Where the model's `routers` are given, tokens go through
    the experts that the batch tells.
    """

    def __init__(
        self,
        model: Model,
        batch: PackedBatch,
        loss: LossSpec,
        *,
        device: torch.device,
        routers: Routers | None = None,
    ) -> None:
        self.metrics = MetricSum()
        self.tokens = 0  # that passed through the model
        self._model, self._batch, self._loss, self._device = model, batch, loss, device
        self._routers = routers

    def __iter__(self) -> Iterator[Tensor]:
        loss_function = resolve_loss(self._loss)
        for micro in self._batch.micro_batches:
            inputs = to_device(micro, self._device)
            with _replayed(self._routers, micro, self._device):  # in the backward pass too: layers may be recomputed
                outputs = _outputs(self._model, inputs, self._batch.temperature, self._loss.outputs)
                result = loss_function(inputs.loss_inputs(outputs))
                yield result.loss
            self.metrics.add(result.metrics)
            self.tokens += len(micro.tokens)


@torch.no_grad()
def forward_outputs(
    model: Model,
    batch: PackedBatch,
    wanted: tuple[Output, ...],
    *,
    device: torch.device,
    routers: Routers | None = None,
) -> ForwardResult:
    """What the model says of every sample, without gradients; of its `routers`, where they are given, the experts that
    they choose or are told by the batch."""
    collector = OutputCollector()
    of_model = tuple(output for output in wanted if routers is None or output is not Output.ROUTED_EXPERTS)
    for micro in batch.micro_batches:
        inputs = to_device(micro, device)
        with _replayed(routers, micro, device, keep=Output.ROUTED_EXPERTS in wanted):
            outputs = _outputs(model, inputs, batch.temperature, of_model)
            if routers is not None and Output.ROUTED_EXPERTS in wanted:
                outputs = {**outputs, Output.ROUTED_EXPERTS: routers.chosen}
        collector.add(micro, outputs)
    return collector.finish(wanted)


def _replayed(
    routers: Routers | None, micro: MicroBatch, device: torch.device, *, keep: bool = False
) -> AbstractContextManager[None]:
    return nullcontext() if routers is None else routers.told(told_experts(routers, micro, device), keep=keep)


def _outputs(
    model: Model, inputs: DeviceBatch, temperature: float, wanted: tuple[Output, ...]
) -> Mapping[Output, Tensor]:
    return model(inputs.tokens, inputs.packing, inputs.positions, temperature, wanted)
