"""Backends with one fault each: the plain backend, and one line of it wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import evolve

from corerl.backend import StateKey
from corerl.backend.base import SAVED
from corerl.checkpoint.writer import stage, write
from corerl.plugin.spec import BackendSpec
from corerl.testing.plain import SPEC
from corerl.testing.plain.backend import PlainBackend
from corerl.types import (
    LossSpec,
    MemoryKind,
    MicroBatch,
    Output,
    PackedBatch,
    SaveResult,
    Step,
    TrainResult,
    UpdateResult,
)
from corerl.weights.chunks import Chunk, TensorSource
from corerl.weights.transport import WeightSender

KINDS = list(MemoryKind)


class Broken(PlainBackend):
    """`seen_by` is the check that has to fail for it, `arguments` that check's own."""

    seen_by: ClassVar[str]
    arguments: ClassVar[dict[str, Any]]
    spec: ClassVar[BackendSpec]

    def __init_subclass__(cls, *, seen_by: str, **arguments: Any) -> None:
        super().__init_subclass__()
        cls.seen_by, cls.arguments = seen_by, arguments
        cls.spec = evolve(SPEC, implementation=f"{__name__}:{cls.__name__}")


class KeepsItsFirstRate(Broken, seen_by="test_training_follows_the_plain_backend", kind="qwen3", packing="packed"):
    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        return super().train(batch, loss, evolve(step, lr=1e-3))


class ForgetsTheTemperature(
    Broken, seen_by="test_forward_gives_what_transformers_gives_in_the_samples_order", kind="qwen3", packing="packed"
):
    def outputs(self, micro: MicroBatch, temperature: float) -> dict[Output, torch.Tensor]:
        return super().outputs(micro, 1.0)


class DecaysNorms(Broken, seen_by="test_training_follows_the_plain_backend", kind="qwen3", packing="padded"):
    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.config.train.optimizer.weight_decay
        return super().train(batch, loss, step)


class CountsSkippedSteps(
    Broken, seen_by="test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_next_one_trains"
):
    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        result = super().train(batch, loss, step)
        self.applied += not result.applied
        return result


class TrainsOnNan(Broken, seen_by="test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_next_one_trains"):
    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        result = super().train(batch, loss, step)
        if not result.applied:
            with torch.no_grad():
                next(iter(self.params.values())).fill_(torch.nan)
        return result


class ScalesItsBatch(Broken, seen_by="test_batches_are_left_as_they_were_given"):
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str):  # type: ignore[no-untyped-def]
        for micro in batch.micro_batches:
            micro.columns["advantages"] = micro.columns["advantages"] * 2
        return super().forward(batch, outputs, weights)


class ReturnsSamplesBackwards(
    Broken, seen_by="test_forward_gives_what_transformers_gives_in_the_samples_order", kind="llama", packing="packed"
):
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str):  # type: ignore[no-untyped-def]
        result = super().forward(batch, outputs, weights)
        return evolve(result, outputs={name: values[::-1] for name, values in result.outputs.items()})


class LosesMomentsOnResume(
    Broken, seen_by="test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit", kind="qwen3-tied"
):
    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        super().after_load(keys, adam_step)
        if StateKey.EXP_AVG in keys:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


class RestartsAdamsCount(
    Broken, seen_by="test_the_checkpoint_goes_on_in_the_plain_backend_and_back", kind="qwen3-tied"
):
    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        super().after_load(keys, None if adam_step is None else 0)


class KeepsTheSnapshot(
    Broken, seen_by="test_snapshots_answer_for_the_weights_they_were_made_of_and_leave_the_current_ones_alone"
):
    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        if weights:
            with super().using(weights):
                swapped = {name: param.detach().clone() for name, param in self.params.items()}
                yield
            with torch.no_grad():
                for name, param in self.params.items():
                    param.copy_(swapped[name])
        else:
            yield


class StagesTooLate(Broken, seen_by="test_a_background_save_holds_what_was_there_when_it_began"):
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        if not background:
            return super().save(path, step, background)
        state = {key.value: self.local_state(key) for key in SAVED}
        extra = {"optimizer_step": step.optimizer_step, "adam_step": self.adam_step, "weights_version": 0}
        self._writer.submit(lambda: write(stage(state, extra), Path(path), 0))
        return SaveResult(path=path, bytes=0, complete=False)


class LeavesATensorOut(
    Broken, seen_by="test_loading_reads_each_ranks_share_once_and_never_holds_the_model", kind="qwen3-tied"
):
    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        return [chunk for chunk in super().local_state(key) if chunk.name != "model.norm.weight"]


class SendsOldWeights(Broken, seen_by="test_an_update_delivers_every_tensor_once_and_bit_for_bit", kind="qwen3-moe"):
    def update_weights(self, sender: WeightSender, version: int) -> UpdateResult:
        self.create_snapshot("current")
        self.load_snapshot("first", "")
        with self.using("first"):
            return super().update_weights(sender, version)


class LoadsTheModelTwice(
    Broken, seen_by="test_loading_reads_each_ranks_share_once_and_never_holds_the_model", kind="qwen3-moe"
):
    def initial_weights(self) -> TensorSource:
        source = super().initial_weights()
        self.copies = [source.read(c.name, c.offsets, c.sizes) * 1 for c in self.local_state(StateKey.MASTER)]
        return source


class SleepsOnOneEye(
    Broken, seen_by="test_sleep_frees_what_it_says_and_waking_restores_every_bit", down=KINDS, up=KINDS
):
    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        return [] if kind is MemoryKind.OPTIMIZER else super().tensors(kind)
