"""The contract between core and backends, API 2.2: the hooks a worker calls, in the order of a backend's life.

A backend implements all of them by extending `corerl.backend.Backend`. Extensions wrap them, as generators that yield
once and return the result, or observe on the driver. Hooks are called on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from corerl.kinds import ALL_KINDS
from corerl.plugin.capabilities import Capability
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
    from corerl.plan.plan import Plan, PlanReady
    from corerl.plugin.events import Event
    from corerl.plugin.spec import PlanAnswer

# ---- arguments of hooks ----------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Context:
    """Which rank of which role a backend is, and where its run is kept."""

    role: str  # actor, ...
    rank: int
    world_size: int
    local_rank: int  # index of the device on this machine
    run_dir: str


@frozen(kw_only=True)
class ProcessFailure:
    """Processes that have ended, and are about to be replaced."""

    message: str  # which process, and why
    ranks: bool  # True: the ranks of all roles are started again, from the newest checkpoint; False: engines alone
    lost: Mapping[str, int]  # "engines" or a role -> how many of its processes were on a machine that is gone


class RunControl(Protocol):
    """A run, as `between_steps` and `ranks_failed` get it; valid during the call."""

    @property
    def step(self) -> int:
        """Rollout steps done."""

    @property
    def plan(self) -> Plan:
        """Of the groups as they are; `plan.record` is its config as plain data."""

    def notice(self, text: str) -> None:
        """Report a sentence that the user should read."""

    def request_stop(self) -> None:
        """Let the run end as a first SIGINT does: saved, as soon as another one can go on from there."""


# ---- the hooks -------------------------------------------------------------------------------------------------------


class Hooks(Protocol):
    """Every hook of API 2.2. All but `shutdown` and those of extensions on the driver have exactly one implementation,
    the backend's."""

    # ---- once --------------------------------------------------------------------------------------------------------

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        """Build the model on this rank, load this rank's part of the weights, and resume from `config.resume`."""

    # ---- every step --------------------------------------------------------------------------------------------------

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        """Add the gradients of all micro-batches to those that the step's earlier calls have left. The loss is a plain
        sum over weighted tokens. `outputs` are returned of the same passes. With `last`, no other call comes before
        `optimizer_step`: gradients may be reduced over ranks while the last passes run."""

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        """Multiply the gradients by `scale`, clip them, take exactly one step at `step.lr` and, if there is any, with
        `step.adam`, or skip it on all ranks alike if the gradient is not finite, and clear them."""

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        """Compute per-token outputs without gradients. For a pass of a snapshot, it is in place of the weights."""

    def update_weights(self, sender: Any, version: int, adapters: bool) -> UpdateResult:
        """Stream all weights through a `corerl.weights.WeightSender`, in the manifest's order; with `adapters` only the
        adapters (`weights.lora = 'adapter'`), for engines that hold the rest."""

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        """Write this rank's part of the portable checkpoint into the directory `path`."""

    # ---- memory ------------------------------------------------------------------------------------------------------

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        """Give the memory of `kinds` back to the device. The host has already removed kinds that are asleep."""

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        """Restore the memory of `kinds`, bit for bit (gradients as zeros)."""

    # ---- the end, and extensions -------------------------------------------------------------------------------------

    def shutdown(self, reason: str) -> None:
        """Release what outlives the process. Called once per plugin; errors are collected, and mask no earlier one.
        `reason` is finished, interrupted or failed."""

    # ---- on the driver, for extensions alone -------------------------------------------------------------------------

    def plan_ready(self, plan: PlanReady) -> PlanAnswer | None:
        """Called where a run has been planned without a problem, before anything of it starts: by `corerl train`,
        `corerl config check` and `corerl doctor`, and for other sizes of a run that goes on. Needs `plans=True` in the
        spec. May read all of `plan`, change nothing of it, and answer with settings to plan again with, notices, and
        problems that end the planning. None: nothing to say. If any extension sets what the plan does not have yet, the
        run is planned again, and all extensions are asked again, about that plan.

        The extension is constructed for this call alone: its run directory may not be there, and must not be made; it
        gets no events and no `shutdown`. A UserError that it raises is a problem of the user's; any other error ends
        the start, with the extension's name."""

    def between_steps(self, run: RunControl) -> None:
        """Called in a run that trains after each step but the last: it has been trained on, reported and saved, and
        nothing else runs on the ranks. May stop the run (`run.request_stop`), or change its groups
        (`corerl_elastic.resize`). Called in the order of the config's list. An error ends the run, with the extension's
        name; a WorkerDied is to be let pass."""

    def ranks_failed(self, run: RunControl, failure: ProcessFailure) -> None:
        """Called where processes have ended, before others are started in their place: all ranks, or engines alone.
        Where a machine is gone (`failure.lost`) somebody must find another, or plan smaller groups, as the extension
        `elastic` does; else the run ends. An error ends it too, with the extension's name."""

    def observe(self, event: Event) -> None:
        """Receive an event. For extensions on the driver only; workers emit no events."""


DRIVER_HOOKS = ("plan_ready", "between_steps", "ranks_failed", "observe")  # of extensions on the driver alone
TRAINING_STATE = frozenset({MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.OPTIMIZER})  # what training goes on from


@frozen(kw_only=True)
class Verb:
    """When a backend may be called, and what it returns."""

    result: type | None = None  # of the hook of that name; None: it is no hook
    needs: frozenset[MemoryKind] = frozenset()  # what must be resident
    capability: Capability | None = None  # that the spec must declare
    trained: bool = False  # only trained roles have it
    modifying: bool = False  # after its failure nothing can go on


PARAMS = frozenset({MemoryKind.PARAM})
VERBS: Mapping[str, Verb] = {
    "init": Verb(result=InitResult, modifying=True),
    "forward_backward": Verb(result=GradientResult, needs=ALL_KINDS, trained=True, modifying=True),
    "optimizer_step": Verb(result=StepResult, needs=ALL_KINDS, trained=True, modifying=True),
    "forward": Verb(result=ForwardResult, needs=PARAMS),
    "update_weights": Verb(result=UpdateResult, needs=PARAMS, trained=True),
    "save": Verb(result=SaveResult, needs=TRAINING_STATE, trained=True),
    "sleep": Verb(result=SleepResult, capability=Capability.SLEEP),
    "wake_up": Verb(result=WakeResult, capability=Capability.SLEEP),
    "train": Verb(),  # both halves of a step
    "snapshot": Verb(needs=PARAMS, capability=Capability.SNAPSHOTS),
    "drop_snapshot": Verb(capability=Capability.SNAPSHOTS),
}
BACKEND_HOOKS = tuple(name for name, verb in VERBS.items() if verb.result is not None)
