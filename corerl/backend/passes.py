"""Passes over a step's micro-batches, for backends whose ranks each call a model on whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from corerl.algorithms.metrics import MetricSum
from corerl.algorithms.registry import resolve_loss
from corerl.backend.batches import DeviceBatch, OutputCollector, to_device
from corerl.backend.experts import ExpertLoad, replayed_experts, require_balance
from corerl.models.routing import Routers
from corerl.pictures import RankTower, Seen
from corerl.types import (
    TARGETS,
    ForwardResult,
    GradientResult,
    LossSpec,
    Metric,
    MicroBatch,
    Output,
    PackedBatch,
    merge_metrics,
)

PREFIXES_SAVED = "prefixes/saved"  # the metric: the fraction of tokens that go through the model with another sequence

# (tokens [T], packing, positions [T], temperature, wanted) -> each [T]; a PackedPolicy, or a wrapper of one. Two more
# arguments follow where there are any: what the tower has made of the pictures that tokens show, and the targets.
Model = Callable[..., Mapping[Output, Tensor]]


class StepLosses:
    """Iterates over the micro-batches' losses, adds up their metrics and keeps the requested outputs. Run the backward
    pass of each loss before asking for the next; `result` is for the end.

    Token weights already hold 1 / denominator of the whole step: the sum over micro-batches and ranks is the step's
    loss, and a library's own averaging must be undone. With `routers`, tokens go through the experts that the batch
    names, metrics say how many each expert gets, and the losses include the balancing loss times `aux_loss_coef`.
    With a `tower`, it encodes the batch's pictures before the first micro-batch, and gets its own gradients after the
    last. Raises Unsupported if the batch, and ModelError if the model, does not allow that.
    """

    def __init__(
        self,
        model: Model,
        batch: PackedBatch,
        loss: LossSpec,
        outputs: tuple[Output, ...],
        *,
        device: torch.device,
        routers: Routers | None = None,
        tower: RankTower | None = None,
        aux_loss_coef: float = 0.0,
    ) -> None:
        require_balance(aux_loss_coef, layers=routers.layers if routers else 0, tokens=batch.step_tokens)
        self._experts: ExpertLoad | None = None
        if routers is not None and routers.layers and (aux_loss_coef or routers.can_record):
            self._experts = ExpertLoad(routers=routers, coef=aux_loss_coef, step_tokens=batch.step_tokens)
        self._metrics = MetricSum()
        self._tokens = 0  # passed through the model so far
        self._saved: Mapping[str, Metric] = {}
        self._model, self._batch, self._loss, self._device = model, batch, loss, device
        self._wanted, self._collector = outputs, OutputCollector()
        self._routers, self._tower = routers, tower

    def __iter__(self) -> Iterator[Tensor]:
        loss_function, own = resolve_loss(self._loss), self._loss.outputs
        computed = tuple(dict.fromkeys((*own, *self._wanted)))
        features = {} if self._tower is None else self._tower.leaves(self._batch.pictures)
        for micro in self._batch.micro_batches:
            inputs = to_device(micro, self._device)
            record = self._experts is not None
            # Spans the backward pass, which may recompute layers.
            with _replayed(self._routers, micro, inputs, record=record):
                seen = None if self._tower is None else self._tower.seen(micro, features)
                outputs = _outputs(self._model, inputs, self._batch.temperature, computed, seen)
                balance = None if self._experts is None else self._experts.add(micro)
                result = loss_function(inputs.loss_inputs({output: outputs[output] for output in own}))
                yield result.loss if balance is None else result.loss + balance
            self._metrics.add(result.metrics)
            self._tokens += inputs.passed.tokens
            if micro.prefix_lengths is not None:
                saved = Metric(len(micro.tokens) - inputs.passed.tokens, len(micro.tokens))
                self._saved = merge_metrics((self._saved, {PREFIXES_SAVED: saved}))
            if self._wanted:
                self._collector.add(micro, {output: outputs[output] for output in self._wanted})
        if self._tower is not None:
            self._tower.backward(self._batch.pictures, features)

    def result(self) -> GradientResult:
        """Called on every rank."""
        of_experts = {} if self._experts is None else self._experts.metrics()
        return GradientResult(
            metrics={**self._metrics.finish(), **of_experts, **self._saved},
            tokens=self._tokens,
            outputs=self._collector.finish(self._wanted) if self._wanted else None,
        )


@torch.no_grad()
def forward_outputs(
    model: Model,
    batch: PackedBatch,
    wanted: tuple[Output, ...],
    *,
    device: torch.device,
    routers: Routers | None = None,
    tower: RankTower | None = None,
) -> ForwardResult:
    """Outputs of every sample, without gradients. `routers` give the routed experts: the batch's, or their own
    choice. A `tower` encodes the batch's pictures first."""
    collector = OutputCollector()
    of_model = tuple(output for output in wanted if routers is None or output is not Output.ROUTED_EXPERTS)
    features = {} if tower is None else tower.encode(batch.pictures)
    for micro in batch.micro_batches:
        inputs = to_device(micro, device)
        seen = None if tower is None else tower.seen(micro, features)
        with _replayed(routers, micro, inputs, keep=Output.ROUTED_EXPERTS in wanted):
            outputs = _outputs(model, inputs, batch.temperature, of_model, seen)
            if routers is not None and Output.ROUTED_EXPERTS in wanted:
                outputs = {**outputs, Output.ROUTED_EXPERTS: routers.chosen}
        collector.add(micro, outputs)
    return collector.finish(wanted)


def _replayed(
    routers: Routers | None, micro: MicroBatch, inputs: DeviceBatch, *, keep: bool = False, record: bool = False
) -> AbstractContextManager[None]:
    if routers is None:
        return nullcontext()
    prefixes = inputs.passed.prefixes
    routers.set_cells(*((None, None) if prefixes is None else (prefixes.token, prefixes.place)))
    return routers.replaying(replayed_experts(routers, micro, inputs.tokens.device), keep=keep, record=record)


def _outputs(
    model: Model, inputs: DeviceBatch, temperature: float, wanted: tuple[Output, ...], seen: Seen | None
) -> Mapping[Output, Tensor]:
    tokens, positions, targets = inputs.tokens, inputs.positions, inputs.columns.get(TARGETS)
    if (prefixes := inputs.passed.prefixes) is not None:
        tokens, positions = (each.index_select(0, prefixes.token) for each in (tokens, positions))
        targets = None if targets is None else targets.index_select(0, prefixes.token)
    more = (seen, targets) if targets is not None else () if seen is None else (seen,)
    outputs = model(tokens, inputs.passed, positions, temperature, wanted, *more)
    return outputs if prefixes is None else {name: x.index_select(0, prefixes.place) for name, x in outputs.items()}
