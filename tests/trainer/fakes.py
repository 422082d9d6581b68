"""A backend without a model, whose log-probs are token numbers: what processes, groups and batches do around one."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from attrs import evolve, frozen
from torch import Tensor

from corerl.algorithms.losses import LossInputs
from corerl.backend.batches import OutputCollector
from corerl.config.options import option
from corerl.config.schema import ClusterInfo, RoleConfig
from corerl.plugin.capabilities import Capability, not_implemented, unsupported
from corerl.plugin.hookspecs import Context
from corerl.plugin.host import BackendBase
from corerl.plugin.spec import BackendSpec, Environment, Problem, hookimpl
from corerl.types import (
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Metric,
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
from corerl.weights.manifest import Manifest, build_manifest
from corerl_testing.plain.spec import SPEC as PLAIN

MANIFEST = build_manifest([("w", (2, 3)), ("b", (3,))], dtype="float32", bucket_bytes=24)


@frozen(kw_only=True)
class FakeConfig:
    optimizer_steps: tuple[int, ...] = option("the start step that each rank reports", default=(0, 0))
    fails_at: int = option("the optimizer step at which the last rank raises", default=-1)
    shards: int = option("must divide the ranks", default=1)


def check(config: FakeConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    if cluster.ranks % config.shards:
        yield Problem("shards", f"{config.shards} does not divide {cluster.ranks} ranks; use a divisor")


def environment(config: FakeConfig, cluster: ClusterInfo) -> Environment:
    return {"FAKE_SHARDS": f"{config.shards} of {cluster.ranks} on {cluster.device}"}


def data_parallel(config: FakeConfig, cluster: ClusterInfo) -> int:
    return cluster.ranks // config.shards


def check_model(config: FakeConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    """Of what is known of the run: nothing is said where it is not known."""
    if heads := cluster.model.get("num_key_value_heads", 0) % 4:
        yield Problem(".model.num_key_value_heads", f"{heads} more than a multiple of 4")
    if cluster.train and cluster.train.recompute != "none":
        yield Problem(".train.recompute", f"{cluster.train.recompute!r}, and it keeps everything")


SPEC = BackendSpec(
    implementation="tests.trainer.fakes:FakeBackend",
    config=FakeConfig,
    api=(2, 0),
    summary="a fake",
    check=check,
    data_parallel=data_parallel,
    environment=environment,
)
NO_REPLAY = evolve(
    PLAIN,
    summary="the plain backend, without routing replay",
    capabilities={**PLAIN.capabilities, Capability.ROUTING_REPLAY: not_implemented("it tells its routers nothing")},
)
CHOOSY = BackendSpec(
    implementation="tests.trainer.fakes:FakeBackend",
    config=FakeConfig,
    api=(2, 0),
    summary="a fake that cannot take every model",
    check=check_model,
)
LIMITED = BackendSpec(
    implementation="tests.trainer.fakes:FakeBackend",
    config=FakeConfig,
    api=(2, 0),
    summary="a fake that can do little",
    capabilities={
        Capability.MULTI_RANK: unsupported("it is one process"),
        Capability.SNAPSHOTS: not_implemented("no host copies yet"),
        Capability.MOE: not_implemented("no experts yet"),
        Capability.RESHARD: unsupported("it reads what it wrote"),
    },
)


class FakeBackend(BackendBase):
    """Whatever it counts is in proportion to the rank plus one."""

    def stream_of(self, *, adapters: bool) -> Manifest:
        assert not adapters
        return MANIFEST

    @hookimpl
    def init(self, config: RoleConfig, context: Context) -> InitResult:
        self.options: FakeConfig = config.options
        self.rank, self.world_size = context.rank, context.world_size
        self.snapshots: dict[str, int] = {}  # by how much log-probs differ under each
        self.layout = ParallelLayout(
            rank=self.rank, world_size=self.world_size, dp_rank=self.rank, dp_size=self.world_size
        )
        # Every rank is there, in a group of its own size: one plus the others' sum.
        together = torch.tensor([1 + self.rank])
        torch.distributed.all_reduce(together)
        assert together.item() == sum(range(1, self.world_size + 1))
        return InitResult(layout=self.layout, optimizer_step=self.options.optimizer_steps[self.rank])

    @hookimpl
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        weights, tokens, collector = 0.0, 0, OutputCollector()
        for micro in batch.micro_batches:
            weights += float(micro.columns["weights"].sum())
            tokens += len(micro.tokens)
            collector.add(micro, dict.fromkeys(outputs, torch.tensor(micro.tokens)))
        metrics = {
            "weights": Metric(weights, 1.0),
            "loss": Metric(weights, 1.0, Reduction.LOSS),
            "tokens": Metric(float(tokens), 0.0),
        }
        return GradientResult(metrics=metrics, tokens=tokens, outputs=collector.finish(outputs) if outputs else None)

    @hookimpl
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        if step.optimizer_step == self.options.fails_at and self.rank == self.world_size - 1:
            raise ArithmeticError("no luck")
        return StepResult(applied=True, grad_norm=step.lr * scale)

    @hookimpl
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        collector = OutputCollector()
        for micro in batch.micro_batches:
            numbers = torch.tensor(micro.tokens) + (self.snapshots[weights] if weights else 0)
            collector.add(micro, dict.fromkeys(outputs, numbers))
        return collector.finish(outputs)

    @hookimpl
    def update_weights(self, sender: object, version: int) -> UpdateResult:
        return UpdateResult(version=version, bytes=10 * (self.rank + 1), seconds=0.5 * (self.rank + 1), engines={})

    @hookimpl
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        return SaveResult(path=path, bytes=100 * (self.rank + 1), complete=not background)

    @hookimpl
    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        return SleepResult(freed_bytes=len(kinds) * (self.rank + 1), residual_bytes=7)

    @hookimpl
    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        return WakeResult(restored_bytes=len(kinds) * (self.rank + 1))

    @hookimpl
    def shutdown(self, reason: str) -> None:
        pass

    def saved(self, wait: bool, *, memory: bool = False) -> bool:
        return wait or self.rank == 0

    def create_snapshot(self, name: str) -> None:
        self.snapshots[name] = 1000

    def load_snapshot(self, name: str, path: str) -> None:
        self.snapshots[name] = int(path or 0)

    def drop_snapshot(self, name: str) -> None:
        del self.snapshots[name]


def no_result(inputs: LossInputs) -> Tensor:
    """A loss that returns no LossResult."""
    return inputs.logprobs.sum()
