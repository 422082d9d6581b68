"""Passes over a step's micro-batches, for backends whose ranks each call a model on whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from corerl.algorithms.metrics import MetricSum
from corerl.algorithms.registry import resolve_loss
from corerl.backend.batches import DeviceBatch, OutputCollector, to_device
from corerl.backend.routing import replayed_experts
from corerl.models.routing import Routers
from corerl.types import ForwardResult, LossSpec, MicroBatch, Output, PackedBatch

# (tokens [T], packing, positions [T], temperature, wanted) -> each [T]; a PackedPolicy, or a wrapper of one.
Model = Callable[..., Mapping[Output, Tensor]]


class StepLosses:
    """Iterates over the micro-batches' losses and adds up their metrics. Run the backward pass of each loss before
    asking for the next.

    Token weights already hold 1 / denominator of the whole step: the sum over micro-batches and ranks is the step's
    loss, and a library's own averaging must be undone. With `routers`, tokens go through the experts that the batch
    names.
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
        self.tokens = 0  # tokens passed through the model so far
        self._model, self._batch, self._loss, self._device = model, batch, loss, device
        self._routers = routers

    def __iter__(self) -> Iterator[Tensor]:
        loss_function = resolve_loss(self._loss)
        for micro in self._batch.micro_batches:
            inputs = to_device(micro, self._device)
            with _replayed(self._routers, micro, self._device):  # spans the backward pass, which may recompute layers
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
    """Outputs of every sample, without gradients. `routers` give the routed experts: the batch's, or their own
    choice."""
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
    return nullcontext() if routers is None else routers.replaying(replayed_experts(routers, micro, device), keep=keep)


def _outputs(
    model: Model, inputs: DeviceBatch, temperature: float, wanted: tuple[Output, ...]
) -> Mapping[Output, Tensor]:
    return model(inputs.tokens, inputs.packing, inputs.positions, temperature, wanted)
