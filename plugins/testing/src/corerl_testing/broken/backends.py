"""The classes behind the specs: each overrides only what is wrong with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import evolve
from safetensors.torch import save as serialized

from corerl.backend import OutputCollector, StateKey, adamw, moments
from corerl.backend.experts import COLUMN
from corerl.backend.optimizer import DECAYED
from corerl.backend.primitives import SAVED
from corerl.checkpoint import stage, write
from corerl.checkpoint.format import tensor_file, write_index
from corerl.checkpoint.writer import with_sums
from corerl.config import RoleConfig
from corerl.errors import SaveFailed
from corerl.models.lora import LoraLinear
from corerl.plugin import Context
from corerl.types import (
    AdamSettings,
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Metric,
    MicroBatch,
    Output,
    PackedBatch,
    ParallelLayout,
    Reduction,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights import Bucket, Chunk, Manifest, TensorSource, WeightSender, build_manifest
from corerl_testing.plain.backend import PlainBackend

# ---- the contract of hooks -------------------------------------------------------------------------------------------


class UnknownArgument(PlainBackend):
    def optimizer_step(self, step: Step, factor: float) -> StepResult:  # this is the fault
        return super().optimizer_step(step, factor)


class DropsResult(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        super().optimizer_step(step, scale)
        return None  # type: ignore[return-value]  # this is the fault


class SwallowsErrors(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        try:
            return super().forward_backward(batch, loss, outputs, last)
        except Exception:
            return GradientResult(metrics={}, tokens=0)


class MutatesBatch(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        result = super().forward_backward(batch, loss, outputs, last)
        for micro in batch.micro_batches:
            if isinstance(micro.columns, dict) and "advantages" in micro.columns:
                micro.columns["advantages"] = micro.columns["advantages"] - micro.columns["advantages"].mean()
        return result


# ---- loading, forward and training -----------------------------------------------------------------------------------


class LeavesATensorOut(PlainBackend):
    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        return [chunk for chunk in super().local_state(key) if chunk.name != "model.norm.weight"]


class LoadsTwice(PlainBackend):
    def initial_weights(self, chunks: Sequence[Chunk]) -> TensorSource:
        source = super().initial_weights(chunks)
        self.copies = [source.read(c.name, c.offsets, c.sizes) * 1 for c in chunks]
        return source


class OffByOneLogprobs(PlainBackend):
    def of_sequences(self, tokens: torch.Tensor, temperature: float, *shown: Any) -> dict[Output, torch.Tensor]:
        found = super().of_sequences(tokens, temperature, *shown)
        if Output.LOGPROBS in found:
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1] / temperature
            found[Output.LOGPROBS] = torch.log_softmax(logits, -1).gather(-1, tokens[:, :-1, None])[..., 0]
        return found


class LeaksBetweenLongSequences(PlainBackend):
    ALONE = 28  # tokens

    def outputs(self, micro: MicroBatch, temperature: float, **asked: Any) -> dict[Output, torch.Tensor]:
        found = super().outputs(micro, temperature, **asked)
        ends = micro.cu_seqlens[:-1] + micro.lengths
        for before, end, length in zip(micro.cu_seqlens, ends[1:], micro.lengths[1:], strict=False):
            if length > self.ALONE:
                both = torch.tensor(micro.tokens[before:end], device=self.device)
                late = torch.arange(end - length + self.ALONE, end, device=self.device)
                for output, values in self.of_sequences(both[None], temperature).items():
                    found[output] = found[output].index_put((late,), values[0, self.ALONE - length :])
        return found


class LeaksInTraining(LeaksBetweenLongSequences):
    def outputs(self, micro: MicroBatch, temperature: float, **asked: Any) -> dict[Output, torch.Tensor]:
        if self.model.training:
            return super().outputs(micro, temperature, **asked)
        return PlainBackend.outputs(self, micro, temperature, **asked)


class LeaksInACritic(LeaksBetweenLongSequences):
    def outputs(self, micro: MicroBatch, temperature: float, **asked: Any) -> dict[Output, torch.Tensor]:
        if self.config.value_head:
            return super().outputs(micro, temperature, **asked)
        return PlainBackend.outputs(self, micro, temperature, **asked)


class ForgetsTemperature(PlainBackend):
    def outputs(self, micro: MicroBatch, temperature: float, **asked: Any) -> dict[Output, torch.Tensor]:
        return super().outputs(micro, 1.0, **asked)


class SamplesBackwards(PlainBackend):
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        result = super().forward(batch, outputs)
        return evolve(result, outputs={name: values[::-1] for name, values in result.outputs.items()})


class LosesWeightsInSwap(PlainBackend):
    @contextlib.contextmanager
    def using(self, snapshot: str) -> Iterator[None]:
        own = {name: param.detach().clone() for name, param in self.params.items()}
        with super().using(snapshot):
            others = {name: param.detach().clone() for name, param in self.params.items()}
        self._put(others)
        yield
        self._put(own)  # not reached if the pass fails

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(weights[name])


class KeepsSnapshot(PlainBackend):
    @contextlib.contextmanager
    def using(self, snapshot: str) -> Iterator[None]:
        with super().using(snapshot):
            used = {name: param.detach().clone() for name, param in self.params.items()}
            yield
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(used[name])


class WrongTokenWeights(PlainBackend):
    """Divides by the tokens of a micro-batch, as a mean over them does, instead of by those of the whole batch."""

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        def weighted(micro: MicroBatch) -> MicroBatch:
            weights = micro.columns["weights"]
            share = weights / max(weights.sum() * batch.count, 1e-9)
            return evolve(micro, columns={**micro.columns, "weights": share.astype(weights.dtype)})

        batch = evolve(batch, micro_batches=map(weighted, batch.micro_batches))
        return super().forward_backward(batch, loss, outputs, last)


class OwnExperts(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        without_experts = (
            evolve(micro, columns={name: micro.columns[name] for name in micro.columns if name != COLUMN})
            for micro in batch.micro_batches
        )
        return super().forward_backward(evolve(batch, micro_batches=without_experts), loss, outputs, last)


class IgnoresAuxLoss(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        self.config = evolve(self.config, train=evolve(self.config.train, aux_loss_coef=0.0))
        return super().forward_backward(batch, loss, outputs, last)


class IgnoresPictures(PlainBackend):
    def shown(self, *asked: Any) -> dict[str, torch.Tensor]:
        return {}


class FreezesTowers(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        result = super().forward_backward(batch, loss, outputs, last)
        for name, param in self.trained.items():
            if "visual" in name:
                param.grad = None
        return result


class KeepsFirstRate(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        return super().optimizer_step(evolve(step, lr=self.config.train.optimizer.lr), scale)


class IgnoresBetas(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        adam = None if step.adam is None else evolve(step.adam, betas=None)
        return super().optimizer_step(evolve(step, adam=adam), scale)


class KeepsAStepsClip(PlainBackend):
    clip_norm: float | None = None

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        if step.adam is not None and step.adam.clip_norm is not None:
            self.clip_norm = step.adam.clip_norm
        adam = evolve(step.adam or AdamSettings(), clip_norm=self.clip_norm)
        return super().optimizer_step(evolve(step, adam=adam), scale)


class IgnoresTargets(PlainBackend):
    def of_sequences(self, tokens: torch.Tensor, temperature: float, *more: Any) -> dict[Output, torch.Tensor]:
        return super().of_sequences(tokens, temperature, *more[:1])


class LosesEqualTargets(PlainBackend):
    def of_sequences(self, tokens: torch.Tensor, temperature: float, *more: Any) -> dict[Output, torch.Tensor]:
        found = super().of_sequences(tokens, temperature, *more)
        if len(more) > 1 and more[1].dim() > 2:
            targets, logprobs = more[1][:, 1:], found[Output.LOGPROBS]
            again = (targets[..., None] == targets[..., None, :]).triu(1).any(-1)
            found[Output.LOGPROBS] = logprobs.detach().where(again, logprobs)
        return found


class SeesOtherBranches(PlainBackend):
    def seen(self, paths: Sequence[torch.Tensor], nodes: int) -> torch.Tensor:
        return torch.ones(nodes, nodes, dtype=torch.bool, device=self.device).tril()


class TrainsOneCopy(PlainBackend):
    def of_tree(self, micro: MicroBatch, first: torch.Tensor, *more: Any) -> dict[Output, torch.Tensor]:
        found = super().of_tree(micro, first, *more)
        kept = torch.zeros(len(micro.tokens), dtype=torch.bool, device=self.device)
        kept[first] = True
        return {output: values.where(kept, values.detach()) for output, values in found.items()}


class AlwaysScales(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        def scaled(params: Iterable[torch.nn.Parameter], limit: float) -> torch.Tensor:
            gradients = [param.grad for param in params if param.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients if math.isfinite(limit) else ():
                gradient.mul_(limit / norm)
            return norm

        with mock.patch.object(torch.nn.utils, "clip_grad_norm_", scaled):
            return super().optimizer_step(step, scale)


class DecaysNorms(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        for group in self.optimizer.param_groups:
            group[DECAYED] = True
        return super().optimizer_step(step, scale)


class CountsSkippedSteps(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        result = super().optimizer_step(step, scale)
        self.adam_step += not result.applied
        return result


# ---- a step in halves ------------------------------------------------------------------------------------------------


class ForgetsEarlierCalls(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        self.optimizer.zero_grad()
        return super().forward_backward(batch, loss, outputs, last)


class StepsInEveryCall(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        result = super().forward_backward(batch, loss, outputs, last)
        if not last:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return result


class IgnoresScale(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        return super().optimizer_step(step, 1.0)


class ClearsTooEarly(PlainBackend):
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        if not self.config.frozen:  # which has no optimizer
            self.optimizer.zero_grad()
        return super().forward(batch, outputs)


class ReturnsOutputsOfOneMicroBatch(PlainBackend):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        result = super().forward_backward(batch, loss, outputs, last)
        micro = next(iter(batch.micro_batches))
        collector = OutputCollector()
        collector.add(micro, self.outputs(micro, batch.temperature))
        return evolve(result, outputs=collector.finish(outputs))


# ---- several ranks ---------------------------------------------------------------------------------------------------


class DataParallel(PlainBackend):
    """The plain backend on several ranks, without a fault: each rank has the whole model, and gradients are summed."""

    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        super().build(config, context)
        return ParallelLayout.data_parallel(rank=context.rank, world_size=context.world_size)

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        self.sum_gradients()
        return super().optimizer_step(step, scale)

    def sum_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        """What has no gradient on any rank, such as a tower in a step on text alone, has none."""
        params = [*self.trained.values()]
        there = torch.tensor([param.grad is not None for param in params]).int()
        dist.all_reduce(there, group=group)
        for param, count in zip(params, there.tolist(), strict=True):
            if count:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad, group=group)

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        return self.of_the_first(super().local_state(key))

    def buffers(self) -> Sequence[Chunk]:
        return self.of_the_first(super().buffers())

    def of_the_first(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        return [evolve(chunk, replica=self.context.rank > 0) for chunk in chunks]


class InPairs(DataParallel):
    """Without a fault too, on one rank or an even number: two neighbors share samples. Each has the whole model, and
    its own gradient of them is the gradient; the first one answers."""

    like_me: dist.ProcessGroup | None = None  # one of each pair

    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        alone, rank, pairs = super().build(config, context), context.rank, context.world_size // 2
        if not pairs:
            return alone
        self.like_me = [dist.new_group([*range(each, 2 * pairs, 2)]) for each in (0, 1)][rank % 2]
        return ParallelLayout(rank=rank, world_size=2 * pairs, dp_rank=rank // 2, dp_size=pairs, outputs=rank % 2 == 0)

    def sum_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        super().sum_gradients(self.like_me)


class AnswersOnEveryRank(InPairs):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        return evolve(super().build(config, context), outputs=True)


class ForgetsOtherPairs(InPairs):
    def sum_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        pass


class RankDependentMetrics(DataParallel):
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        result = super().forward_backward(batch, loss, outputs, last)
        return evolve(result, metrics={name: self.finished(metric) for name, metric in result.metrics.items()})

    def finished(self, metric: Metric) -> Metric:
        return Metric(metric.value) if metric.reduction is Reduction.MEAN and metric.weight else metric


class ReducesTwice(DataParallel):
    """Sums gradients over ranks after each call, those of earlier calls again."""

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        result = super().forward_backward(batch, loss, outputs, last)
        if not last:
            self.sum_gradients()
        return result


# ---- checkpoints, weights and memory ---------------------------------------------------------------------------------


class ForgetsOptimizer(PlainBackend):
    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        super().after_load(keys, adam_step)
        if StateKey.EXP_AVG in keys:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


class PartialCheckpoint(PlainBackend):
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        staged = stage({key.value: self.local_state(key) for key in SAVED}, counters(self, step))
        directory, rank = Path(path), self.layout.rank

        def index_first() -> None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                write_index(directory, rank, with_sums(staged.index, staged.tensors))
                (directory / tensor_file(rank)).write_bytes(serialized(staged.tensors))
            except OSError as error:
                raise SaveFailed(f"cannot write {directory}: {error}") from error

        if background:
            self._writer.submit(index_first)
        else:
            index_first()
        return SaveResult(path=path, bytes=staged.bytes, complete=not background)


class StagesTooLate(PlainBackend):
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        if not background:
            return super().save(path, step, background)
        state, extra = {key.value: self.local_state(key) for key in SAVED}, counters(self, step)
        self._writer.submit(lambda: write(stage(state, extra), Path(path), self.layout.rank))
        return SaveResult(path=path, bytes=0, complete=False)


def counters(backend: PlainBackend, step: Step) -> Mapping[str, int | str]:
    """What a checkpoint holds besides tensors."""
    return {
        "optimizer_step": step.optimizer_step,
        "adam_step": backend.adam_step,
        "weights_version": backend.weights_version,
        "backend": type(backend).__qualname__,
        "world_size": backend.layout.world_size,
    }


class StaleWeights(PlainBackend):
    def update_weights(self, sender: WeightSender, version: int, adapters: bool) -> UpdateResult:
        self.load_snapshot("start", "")
        with self.using("start"):
            return super().update_weights(sender, version, adapters)


class SendsOnce(PlainBackend):
    """Caches what it gathered for the engines, and keeps sending it after training."""

    sent: Sequence[Chunk] = ()

    def gather(self, bucket: Bucket, out: torch.Tensor | None, *, chunks: Sequence[Chunk], root: int | None) -> None:
        self.sent = self.sent or [evolve(chunk, view=chunk.view.clone()) for chunk in chunks]
        super().gather(bucket, out, chunks=self.sent, root=root)


class RoundsBuffers(PlainBackend):
    def _precise_dtypes(self, gathered: Manifest) -> dict[str, str]:
        return {}


class LoadsMomentsAnyway(PlainBackend):
    def init(self, config: RoleConfig, context: Context) -> InitResult:
        return super().init(evolve(config, resume_moments=True), context)


class SkipsTiedParameter(PlainBackend):
    def init(self, config: RoleConfig, context: Context) -> InitResult:
        result = super().init(config, context)
        if self.model.config.tie_word_embeddings:
            manifest = build_manifest(
                [(name, shape) for name, shape in self._gather_plan.shapes if "embed_tokens" not in name],
                dtype=self._stream.gathered.dtype,
                bucket_bytes=config.weights.bucket_bytes,
            )
            self._stream = self._stream_of(manifest)
        return result


class LeaksOnSleep(PlainBackend):
    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        if MemoryKind.PARAM in kinds:
            self.kept = [param.detach().clone() for param in self.params.values()]
        return super().sleep(kinds)


class KeepsGradients(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        result = super().optimizer_step(step, scale)
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        return result


class LeaksBesideGradients(LeaksOnSleep):
    """Its gradients stay from step to step, as those in a buffer do, and sleep with the rest, so that less is alive
    asleep than awake, even with the copy."""

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        result = super().optimizer_step(step, scale)
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        return result

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        if kind is not MemoryKind.GRAD:
            return super().tensors(kind)
        return [param.grad for param in self.params.values() if param.grad is not None]


class KeepsMomentsAwake(PlainBackend):
    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        return [] if kind is MemoryKind.OPTIMIZER else super().tensors(kind)


class PredictsTooLittle(PlainBackend):
    """Without a fault here: what it holds is more than its spec says."""

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        return super().tensors(kind)


class WakesDirty(PlainBackend):
    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        result = super().wake_up(kinds)
        if MemoryKind.OPTIMIZER in kinds:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        return result


class TrainsAFrozenRole(PlainBackend):
    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        result = super().wake_up(kinds)
        if self.config.frozen:
            self.optimizer = adamw(
                self.params, dict.fromkeys(self.params, ()), self.config.train.optimizer, fused=False
            )
            for param in self.params.values():
                moments(self.optimizer, param, self.adam_step)
        return result


class ScalesAdaptersTwice(PlainBackend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        layout = super().build(config, context)
        for module in self.model.modules():
            if isinstance(module, LoraLinear):
                module.scale *= 2
        return layout


class TrainsBesideAdapters(PlainBackend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        layout = super().build(config, context)
        if config.lora is not None:
            norm = self.params["model.norm.weight"].requires_grad_()
            self.optimizer.add_param_group({"params": [norm], DECAYED: False})
        return layout


class SendsWithoutAdapters(PlainBackend):
    def _gather_float32(
        self, bucket: Bucket | None, use: str, chunks: Sequence[Chunk], *, root: int | None
    ) -> torch.Tensor | None:
        return None if use == "adapters" else super()._gather_float32(bucket, use, chunks, root=root)
