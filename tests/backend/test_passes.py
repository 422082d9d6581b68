"""Passes over micro-batches with a model of one number, against sums made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from corerl.algorithms.losses import LossInputs, LossResult, TensorMetric
from corerl.backend.passes import PREFIXES_SAVED, StepLosses, forward_outputs
from corerl.models.routing import Routers
from corerl.ops.packing import PackedSequences
from corerl.types import LossSpec, Metric, MicroBatch, Output, PackedBatch
from tests.backend.test_batches import CPU, micro_batch

FIRST, SECOND = micro_batch([0, 1], [3, 2], multiple=1), micro_batch([2, -1], [4, 1], multiple=1)


def weighted(inputs: LossInputs) -> LossResult:
    """The sum of weight x log-prob, and the mean of the log-probs as a metric."""
    assert inputs.logprobs is not None and inputs.entropy is None
    count = torch.tensor(float(inputs.logprobs.numel()))
    return LossResult(
        (inputs.columns["weights"] * inputs.logprobs).sum(),
        {"mean": TensorMetric(inputs.logprobs.detach().sum(), count)},
    )


LOSS = LossSpec(name="tests.backend.test_passes:weighted")
OF_EACH_TOKEN = [4.0 * token for token in [0, 1, 2, 100, 101, 200, 201, 202, 203]]  # of the samples 0, 1 and 2


class Slope:
    """Says of each token slope x token / temperature, and of nothing more than is wanted."""

    def __init__(self) -> None:
        self.slope = torch.tensor(2.0, requires_grad=True)

    def __call__(
        self,
        tokens: Tensor,
        packing: PackedSequences,
        positions: Tensor,
        temperature: float,
        wanted: tuple[Output, ...],
    ) -> Mapping[Output, Tensor]:
        assert len(tokens) == len(positions) == packing.cu_seqlens[-1]
        return dict.fromkeys(wanted, self.slope * tokens / temperature)


@pytest.mark.parametrize("lazily", [False, True])
def test_a_steps_losses_come_one_by_one_and_add_up(lazily: bool) -> None:
    micros = [FIRST, SECOND]
    model = Slope()
    batch = PackedBatch(micro_batches=iter(micros) if lazily else micros, count=2, temperature=0.5)
    losses = StepLosses(model, batch, LOSS, (Output.ENTROPY,), device=CPU)
    gradients = []
    for value in losses:
        value.backward()
        assert model.slope.grad is not None
        gradients.append(model.slope.grad.item())
    of_each = [float((micro.columns["weights"] * micro.tokens).sum()) / 0.5 for micro in micros]
    assert gradients == [of_each[0], sum(of_each)]
    result = losses.result()
    assert result.tokens == 10
    mean = result.metrics["mean"]
    assert (mean.value, mean.weight) == (sum(4.0 * float(micro.tokens.sum()) for micro in micros) / 10, 10)
    assert result.outputs is not None and result.outputs.rows.tolist() == [0, 1, 2]
    assert result.outputs.outputs[Output.ENTROPY].tolist() == OF_EACH_TOKEN


def test_a_step_that_wants_no_outputs_keeps_none() -> None:
    losses = StepLosses(Slope(), PackedBatch(micro_batches=[FIRST], count=1, temperature=0.5), LOSS, (), device=CPU)
    for value in losses:
        value.backward()
    assert losses.result().outputs is None


class Listening(Routers):
    """Of no model: what is told while something passes through it, and what then was chosen."""

    layers, experts, topk = 1, 8, 2
    can_record = False

    def __init__(self) -> None:
        self.now: list[list[list[int]]] | None = None

    @contextmanager
    def replaying(self, experts: Tensor | None, *, keep: bool = False, record: bool = False) -> Iterator[None]:
        self.now = None if experts is None else experts.tolist()
        yield
        self.now = None

    @property
    def chosen(self) -> Tensor:
        return torch.tensor(self.now)


def replayed(micro: MicroBatch, first: int) -> MicroBatch:
    """With experts of its tokens, of which no two are told the same."""
    column = np.stack([np.arange(first, first + len(micro.tokens)) % 8, np.full(len(micro.tokens), 7)], axis=1)
    column[column[:, 0] == 7, 1] = 0
    return evolve(micro, columns={**micro.columns, "routed_experts": column[:, None].astype(np.int16)})


def test_chosen_experts_are_an_output() -> None:
    micros = [replayed(FIRST, 0), replayed(SECOND, 3)]
    batch = PackedBatch(micro_batches=micros, count=2, temperature=0.5)
    wanted = (Output.ENTROPY, Output.ROUTED_EXPERTS)
    found = forward_outputs(Slope(), batch, wanted, device=CPU, routers=Listening()).outputs
    assert found[Output.ENTROPY].tolist() == OF_EACH_TOKEN
    of_all = np.concatenate([micro.columns["routed_experts"] for micro in micros])
    assert found[Output.ROUTED_EXPERTS].tolist() == of_all[:9].tolist()  # but for the filler


def test_outputs_are_those_of_the_samples_without_gradient() -> None:
    batch = PackedBatch(micro_batches=[FIRST, SECOND], count=2, temperature=0.5)
    result = forward_outputs(Slope(), batch, (Output.ENTROPY,), device=CPU)
    assert result.rows.tolist() == [0, 1, 2]
    assert result.offsets.tolist() == [0, 3, 5, 9]
    assert result.outputs.keys() == {Output.ENTROPY}
    assert result.outputs[Output.ENTROPY].tolist() == OF_EACH_TOKEN


def test_tokens_in_common_pass_once_for_all_sequences() -> None:
    alike = evolve(SECOND, tokens=np.array([7, 8, 9, 6, 7]), prefix_lengths=np.array([0, 1]))
    passed: list[list[int]] = []

    class Noting(Slope):
        def __call__(self, tokens: Tensor, packing: PackedSequences, positions: Tensor, *more: Any) -> Any:
            passed.append([*tokens.tolist(), *positions.tolist()])
            return dict.fromkeys(more[1], self.slope * tokens / more[0])

    model = Noting()
    batch = PackedBatch(micro_batches=[FIRST, alike], count=2, temperature=0.5)
    losses = StepLosses(model, batch, LOSS, (Output.LOGPROBS,), device=CPU)
    for loss in losses:
        loss.backward()
    assert passed[1] == [7, 8, 9, 6, 0, 1, 2, 3]
    result = losses.result()
    assert result.tokens == len(FIRST.tokens) + 4
    assert result.metrics[PREFIXES_SAVED] == Metric(1.0, 5.0)
    every = [(each.columns["weights"] * each.tokens).sum() / 0.5 for each in (FIRST, alike)]
    assert float(model.slope.grad) == pytest.approx(sum(every))  # type: ignore[arg-type]  # there is one
    assert result.outputs is not None
    assert result.outputs.outputs[Output.LOGPROBS][-4:].tolist() == [4.0 * token for token in (7, 8, 9, 6)]
