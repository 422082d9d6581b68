"""A backend that does nothing, so that only the cost of reaching it is left."""

from __future__ import annotations

from collections.abc import Set

from attrs import frozen

from corerl.config.schema import RoleConfig
from corerl.plugin.hooks import Context
from corerl.plugin.host import BackendBase
from corerl.plugin.spec import BackendSpec
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
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    TrainResult,
    UpdateResult,
    WakeResult,
)

# As many as a step of the clipped loss returns.
METRICS = {f"metric_{number}": Metric(1.0) for number in range(8)}


@frozen(kw_only=True)
class EmptyConfig:
    """No options."""


SPEC = BackendSpec(
    implementation="benchmarks.empty_backend:EmptyBackend", config=EmptyConfig, api=(2, 0), summary="does nothing"
)


def empty_result() -> TrainResult:
    return TrainResult(applied=True, metrics=METRICS, grad_norm=1.0, tokens=0)


class EmptyBackend(BackendBase):
    phase = ""

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        rank, size = context.rank, context.world_size
        self.layout = ParallelLayout(rank=rank, world_size=size, dp_rank=rank, dp_size=size)
        return InitResult(layout=self.layout)

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        return GradientResult(metrics=METRICS, tokens=0)

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        return StepResult(applied=True, grad_norm=1.0)

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        raise NotImplementedError("only training is measured")

    def update_weights(self, sender: object, version: int, adapters: bool) -> UpdateResult:
        return UpdateResult(version=version, bytes=0, seconds=0.0)

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        return SaveResult(path=path, bytes=0, complete=True)

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        return SleepResult(freed_bytes=0, residual_bytes=0)

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        return WakeResult(restored_bytes=0)

    def shutdown(self, reason: str) -> None:
        pass
