"""The plain backend as a caller meets it that does not keep the contract: no host stands between to refuse first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.errors import ContractError
from corerl.plugin import Context
from corerl.types import MemoryKind, MicroBatch, Output, PackedBatch
from corerl_testing.harness import LOSS, Setup, make_worker, packed_for_training, samples_at, step_at
from corerl_testing.inprocess import InProcessSender
from corerl_testing.plain.strict import StrictPlainBackend
from corerl_testing.pool import OneRank

PARAM, OPTIMIZER = frozenset({MemoryKind.PARAM}), frozenset({MemoryKind.OPTIMIZER})


class Caller:
    """A caller that keeps the contract as long as it is not told otherwise."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.worker = setup, make_worker(setup)
        backend = self.worker.backend
        assert isinstance(backend, StrictPlainBackend)
        self.backend = backend

    def init(self, **context: int) -> None:
        given = Context(role="actor", rank=0, world_size=1, local_rank=0, run_dir="")
        self.backend.init(self.worker.config, evolve(given, **context))

    def batch(self, number: int = 0) -> PackedBatch:
        return packed_for_training(self.worker, self.setup, samples_at(number))

    def train(self, number: int, batch: PackedBatch | None = None, lr: float = 1e-3) -> bool:
        self.backend.forward_backward(batch or self.batch(number), LOSS, (), True)
        return self.step(number, lr=lr)

    def add(self, last: bool = False, outputs: tuple[Output, ...] = ()) -> None:
        self.backend.forward_backward(self.batch(), LOSS, outputs, last)

    def step(self, number: int, lr: float = 1e-3, scale: float = 1.0) -> bool:
        return self.backend.optimizer_step(evolve(step_at(number), lr=lr), scale).applied

    def forward(self, batch: PackedBatch) -> None:
        self.backend.forward(batch, LOSS.outputs)

    def update(self, version: int) -> None:
        self.backend.update_weights(InProcessSender(lambda bucket: None), version, False)

    def with_micro_batches(self, change: Callable[[MicroBatch], MicroBatch]) -> PackedBatch:
        batch = self.batch()
        return evolve(batch, micro_batches=[change(micro) for micro in batch.micro_batches])


@pytest.fixture
def caller(model_directories: Mapping[str, Path]) -> Caller:
    return Caller(Setup(backend="plain", model=str(model_directories["qwen3"])).packed_by(48, sequence_multiple=4))


class Overwritten(list[MicroBatch]):
    """Micro-batches in one memory, each written over by the next."""

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in super().__iter__():
            yield micro
            micro.tokens[:] = 0


def column(**changed: Any) -> Callable[[MicroBatch], MicroBatch]:
    return lambda micro: evolve(micro, columns={**micro.columns, **{name: of(micro) for name, of in changed.items()}})


def every_weight(micro: MicroBatch) -> Any:
    return np.ones_like(micro.columns["weights"])


def not_masked_in_padding(micro: MicroBatch) -> Any:
    padded = np.diff(micro.cu_seqlens)
    return (micro.positions >= np.repeat(micro.lengths, padded)).astype(np.float32)


def trains(change: Callable[[MicroBatch], MicroBatch]) -> Callable[[Caller], object]:
    return lambda it: it.train(0, it.with_micro_batches(change))


WEIGHTS = r"micro-batch \d is malformed: weights are not 0 in"
NOTHING = PackedBatch(micro_batches=[], count=0)
WRONG: dict[str, tuple[Callable[[Caller], object], str]] = {
    "init a second time": (lambda it: it.init(), "init was called on a backend in state 'ready'"),
    "a step before its turn": (lambda it: it.train(1), "optimizer_step was given optimizer step 1, expected 0"),
    "a step twice": (lambda it: [it.train(0), it.train(0)], "optimizer_step was given optimizer step 0, expected 1"),
    "a rate that is no number": (lambda it: it.train(0, lr=float("nan")), "optimizer_step was given the learning rate"),
    "a scale of nothing": (lambda it: [it.add(), it.step(0, scale=0.0)], "optimizer_step was given the scale 0.0"),
    "a step without gradients": (lambda it: it.step(0), "optimizer_step was called without"),
    "a second step without gradients": (lambda it: [it.train(0), it.step(1)], "optimizer_step was called without"),
    "a call after the last": (lambda it: [it.add(last=True), it.add()], "forward_backward was called after the"),
    "a call without a micro-batch": (lambda it: it.train(0, NOTHING), "forward_backward was called without"),
    "a training output that is not there": (
        lambda it: it.add(outputs=(Output.VALUES,)),
        r"forward_backward was asked for \['values'\]",
    ),
    "a checkpoint of half a step": (
        lambda it: [it.add(), it.backend.save("", step_at(0), False)],
        "save was called while gradients wait",
    ),
    "gradients asleep before their step": (
        lambda it: [it.add(), it.backend.sleep(frozenset(MemoryKind))],
        "sleep was given gradients that wait",
    ),
    "the wrong count": (lambda it: it.train(0, evolve(it.batch(), count=1)), r"got \d micro-batches, but 1 were"),
    "a batch overwritten in training": (
        lambda it: it.train(0, evolve(it.batch(), micro_batches=Overwritten(it.batch().micro_batches))),
        "tokens of micro-batch 0 was changed during forward_backward",
    ),
    "a batch overwritten in forward": (
        lambda it: it.forward(evolve(it.batch(), micro_batches=Overwritten(it.batch().micro_batches))),
        "tokens of micro-batch 0 was changed during forward",
    ),
    "positions that go on": (
        trains(lambda micro: evolve(micro, positions=np.arange(len(micro.tokens)))),
        "micro-batch 0 is malformed: positions do not",
    ),
    "a column that is too short": (
        trains(column(advantages=lambda micro: np.zeros(1, np.float32))),
        "micro-batch 0 is malformed: column 'advantages'",
    ),
    "lengths longer than the padding": (
        trains(lambda micro: evolve(micro, lengths=micro.lengths + 4)),
        "micro-batch 0 is malformed: lengths .* do not fit",
    ),
    "weights on first tokens": (trains(column(weights=every_weight)), WEIGHTS),
    "weights in padding": (trains(column(weights=not_masked_in_padding)), WEIGHTS),
    "weights in a filler": (trains(lambda micro: evolve(micro, rows=np.full_like(micro.rows, -1))), WEIGHTS),
    "an output that the model has not": (
        lambda it: it.backend.forward(it.batch(), ("values",)),  # type: ignore[arg-type]
        r"forward was asked for \['values'\]",
    ),
    "a version twice": (lambda it: [it.update(0), it.update(0)], "update_weights was given version 0"),
    "an older version": (lambda it: [it.update(3), it.update(2)], "update_weights was given version 2"),
    "a checkpoint of another step": (lambda it: it.backend.save("", step_at(1), False), "save was given optimizer"),
    "training asleep": (lambda it: [it.backend.sleep(OPTIMIZER), it.train(0)], "forward_backward was called while"),
    "sleep asleep": (
        lambda it: [it.backend.sleep(PARAM), it.backend.sleep(PARAM | OPTIMIZER)],
        "sleep was given kinds that are already",
    ),
    "waking what is awake": (lambda it: it.backend.wake_up(PARAM), "wake_up was given kinds that are already awake"),
    "training after the end": (lambda it: [it.backend.shutdown(""), it.train(0)], "forward_backward was called on a"),
    "shutdown twice": (lambda it: [it.backend.shutdown(""), it.backend.shutdown("")], "shutdown was called twice"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_violation_of_the_contract_is_named(wrong: str, caller: Caller) -> None:
    breaks, message = WRONG[wrong]

    def call() -> None:
        caller.init()
        breaks(caller)

    with pytest.raises(ContractError, match=f"^the caller broke the contract: {message}"):
        OneRank().run(call)


def test_a_wrong_first_call_is_named(caller: Caller) -> None:
    with pytest.raises(ContractError, match="forward_backward was called on a backend in state 'new'"):
        caller.backend.forward_backward(NOTHING, LOSS, (), True)
    with pytest.raises(ContractError, match="got rank 1 of 1 ranks"):
        caller.init(rank=1)


def test_a_caller_that_keeps_the_contract_is_served(caller: Caller, tmp_path: Path) -> None:
    """Every hook in a row; a step that was skipped may be given once more."""

    def call() -> tuple[list[bool], torch.Tensor]:
        caller.init()
        nan = caller.with_micro_batches(column(advantages=lambda micro: np.full(len(micro.tokens), np.nan, np.float32)))
        applied = [caller.train(0), caller.train(1, nan), caller.train(1), caller.train(2)]
        caller.add(outputs=(Output.ENTROPY,))
        caller.forward(caller.batch())
        caller.update(0)
        caller.update(5)
        caller.backend.sleep(PARAM | OPTIMIZER)
        caller.backend.wake_up(OPTIMIZER)
        caller.backend.wake_up(PARAM)
        caller.add()
        applied.append(caller.step(3, scale=0.5))
        caller.backend.save(str(tmp_path), step_at(4), False)
        caller.backend.shutdown("the test is done")
        return applied

    assert OneRank().run(call) == [[True, False, True, True, True]]
