"""The contract between core and backends, API 2.0: the hooks a worker calls, in the order of a backend's life.

A backend implements all of them by extending `corerl.backend.Backend`. Extensions wrap them
(`@hookimpl(wrapper=True)`, ending in `return (yield)`) or observe on the driver. Hooks are called on every rank.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

from corerl.plugin.api import API, PROJECT, hookimpl, hookspec
from corerl.types import (
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    UpdateResult,
    WakeResult,
)

if TYPE_CHECKING:
    from corerl.config.schema import RoleConfig
    from corerl.plugin.context import Context
    from corerl.plugin.events import Event

__all__ = ["API", "NEEDS", "PROJECT", "REQUIRED", "RESULTS", "Hooks", "hookimpl", "hookspec"]


class Hooks:
    """Every hook of API 2.0. All but `shutdown` and `observe` have exactly one implementation, the backend's."""

    # ---- once --------------------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def init(self, config: RoleConfig, context: Context) -> InitResult:
        """Build the model on this rank, load this rank's share of the weights, and resume from `config.resume`."""
        raise AssertionError("a specification is never called")

    # ---- every step --------------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        """Add the gradients of all micro-batches to those that the step's earlier calls have left. The loss is a plain
        sum over weighted tokens. `outputs` are returned of the same passes. With `last`, no other call comes before
        `optimizer_step`: gradients may be reduced over ranks while the last passes run."""
        raise AssertionError("a specification is never called")

    @hookspec(firstresult=True)
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        """Multiply the gradients by `scale`, clip them, take exactly one step at `step.lr`, or skip it on all ranks
        alike if the gradient is not finite, and clear them."""
        raise AssertionError("a specification is never called")

    @hookspec(firstresult=True)
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        """Compute per-token outputs without gradients, under the snapshot `weights`; "" means the current weights."""
        raise AssertionError("a specification is never called")

    @hookspec(firstresult=True)
    def update_weights(self, sender: Any, version: int, adapters: bool) -> UpdateResult:
        """Stream all weights through a `corerl.weights.WeightSender`, in the manifest's order; with `adapters` those of
        a role with `weights.lora = 'adapter'` alone, for engines that hold the rest."""
        raise AssertionError("a specification is never called")

    @hookspec(firstresult=True)
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        """Write this rank's part of the portable checkpoint into the directory `path`."""
        raise AssertionError("a specification is never called")

    # ---- memory ------------------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        """Give the memory of `kinds` back to the device. The host has already removed kinds that are asleep."""
        raise AssertionError("a specification is never called")

    @hookspec(firstresult=True)
    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        """Restore the memory of `kinds`, bit for bit (gradients as zeros)."""
        raise AssertionError("a specification is never called")

    # ---- the end, and extensions -------------------------------------------------------------------------------------

    @hookspec
    def shutdown(self, reason: str) -> None:
        """Release what outlives the process. Called once per plugin; errors are collected, and mask no earlier one.
        `reason` is finished, interrupted or failed; for extensions on the driver also restarted: the run starts anew
        from an older checkpoint, with new instances, and no RunFinished was told."""

    @hookspec
    def observe(self, event: Event) -> None:
        """Receive an event. For extensions on the driver only; workers emit no events."""


REQUIRED = ("init", "forward_backward", "optimizer_step", "forward", "update_weights", "save", "sleep", "wake_up")
RESULTS: dict[str, type] = {
    "init": InitResult,
    "forward_backward": GradientResult,
    "optimizer_step": StepResult,
    "forward": ForwardResult,
    "update_weights": UpdateResult,
    "save": SaveResult,
    "sleep": SleepResult,
    "wake_up": WakeResult,
}
STATE = frozenset({MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.OPTIMIZER})  # what training goes on from
NEEDS: dict[str, frozenset[MemoryKind]] = {
    "forward_backward": frozenset(MemoryKind),
    "optimizer_step": frozenset(MemoryKind),
    "forward": frozenset({MemoryKind.PARAM}),
    "update_weights": frozenset({MemoryKind.PARAM}),
    "save": STATE,
}
