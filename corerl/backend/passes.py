"""The passes over a step's micro-batches, for backends in which each rank calls a model and gets whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from corerl.algorithms.metrics import MetricSum
from corerl.algorithms.registry import resolve_loss
from corerl.backend.batches import DeviceBatch, OutputCollector, to_device
from corerl.types import ForwardResult, LossSpec, Output, PackedBatch

# (tokens [T], packing, positions [T], temperature, wanted) -> each [T]; a CausalPolicy, and whatever wraps one.
Model = Callable[..., Mapping[Output, Tensor]]


class StepLosses:
    """The loss of each micro-batch in turn, for a backward pass before the next is asked for, and what they came to.

    The tokens' weights already hold 1 / denominator of the whole step: a sum over micro-batches and ranks is the step's
    loss, and an average that a library takes must be undone.
    """

    def __init__(self, model: Model, batch: PackedBatch, loss: LossSpec, *, device: torch.device) -> None:
        self.metrics = MetricSum()
        self.tokens = 0  # that passed through the model
        self._model, self._batch, self._loss, self._device = model, batch, loss, device

    def __iter__(self) -> Iterator[Tensor]:
        loss_function = resolve_loss(self._loss)
        for micro in self._batch.micro_batches:
            inputs = to_device(micro, self._device)
            outputs = _outputs(self._model, inputs, self._batch.temperature, self._loss.outputs)
            result = loss_function(inputs.loss_inputs(outputs))
            yield result.loss
            self.metrics.add(result.metrics)
            self.tokens += len(micro.tokens)


@torch.no_grad()
def forward_outputs(
    model: Model, batch: PackedBatch, wanted: tuple[Output, ...], *, device: torch.device
) -> ForwardResult:
    """What the model says of every sample, without gradients."""
    collector = OutputCollector()
    for micro in batch.micro_batches:
        collector.add(micro, _outputs(model, to_device(micro, device), batch.temperature, wanted))
    return collector.finish(wanted)


def _outputs(
    model: Model, inputs: DeviceBatch, temperature: float, wanted: tuple[Output, ...]
) -> Mapping[Output, Tensor]:
    return model(inputs.tokens, inputs.packing, inputs.positions, temperature, wanted)
