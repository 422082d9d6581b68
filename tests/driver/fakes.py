"""A run's ranks, engines, roles and listeners, as far as the driver sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import attrs
import numpy as np
from attrs import evolve

from corerl.algorithms.base import REFERENCE
from corerl.calls import Future
from corerl.config.schema import Config
from corerl.config.toml_text import to_plain
from corerl.data.packing import StepPlan
from corerl.data.prompts import SortDigits
from corerl.driver.engines import Engines
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.engines.base import Received
from corerl.errors import CorerlError, WorkerDied
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.data import RolloutPlan
from corerl.plan.plan import Plan
from corerl.plan.residency import residency_stages
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.resume import Start
from corerl.plan.roles import CLIPPED
from corerl.plugin.events import Event, Notice, RunFinished, StepFinished
from corerl.plugin.observers import Observers
from corerl.trainer.group import StoredBatch, TrainGroup
from corerl.types import (
    LossSpec,
    MemoryKind,
    Output,
    ParallelLayout,
    SleepResult,
    Step,
    TrainResult,
    UpdateResult,
)
from corerl.weights.transport import Address
from tests.driver.saved import make_config

Kind = TypeVar("Kind")
EXPERTS = Output.ROUTED_EXPERTS
CHOSEN = np.arange(5 * 3 * 2, dtype=np.int16).reshape(5, 3, 2)  # of 5 tokens, 3 layers, 2 experts


class Group:
    """Ranks and engines of a run, as far as the driver sees them; notes what is asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.losses: list[LossSpec] = []
        self.passes: list[tuple[tuple[Output, ...], str, bool]] = []  # outputs, weights, whether experts are replayed
        self.processes = self
        self.changes = 0
        self.loaded_step = self.loaded_version = 0
        self.ended = False
        self.failure: Exception | None = None
        self.any_dead = False
        self.hold_all = False  # all engines hold all weights
        self.offered: Any = None  # the manifest of the last update
        self.manifests: tuple[Any, Any] = (None, None)  # of all weights, and of adapters alone
        self.meetings = 0
        self.answers = True
        self.layouts = [ParallelLayout(rank=0, world_size=1, dp_rank=0, dp_size=1)]
        self.sent = UpdateResult(bytes=8, seconds=0.0, engines={"engine-0": "", "engine-1": ""})
        self.names = ("engine-0", "engine-1")
        self.fared = {name: Received(bytes=8) for name in self.names}  # in the update that comes next
        self.later: list[dict[str, Received]] = []  # in those after it; when they are used up, all goes well
        self.allowed = 10  # restarts
        self.verified: list[bool] = []  # update by update
        self.sums: dict[str, Any] = {}  # by engine

        self.role_plan: Any = None
        self.slept = [SleepResult(freed_bytes=8, residual_bytes=0)]

    def weight_sums(self, dtype: str) -> dict[str, Any]:
        assert dtype == "float32"
        return self.sums

    @property
    def deaths(self) -> dict[str, CorerlError]:
        return {"engine-1": WorkerDied("its process died")} if self.any_dead else {}

    def wake_up(self, kinds: Iterable[MemoryKind] = ()) -> Future[None]:
        self.log.append(" ".join(["wake", *sorted(kinds)]))
        return Future(self, self.ready, lambda: None)

    def sleep(self, kinds: Iterable[MemoryKind] = ()) -> Future[list[SleepResult]]:
        self.log.append(" ".join(["sleep", *sorted(kinds)]))
        return Future(self, self.ready, lambda: self.slept)

    def update_weights(
        self, address: Any, version: int, *, verify: bool, adapters: bool, snapshot: str
    ) -> Future[UpdateResult]:
        assert not snapshot  # of a run
        self.verified.append(verify)
        self.log.append(f"send {version}" + (" of adapters" if adapters else ""))
        return Future(self, self.ready, self._updated)

    def receive(self, manifest: Any, version: int, address: Any) -> None:
        self.log.append(f"receive {version}")
        self.offered, self.address = manifest, address

    def updated(self, taken: Iterable[str], held: Mapping[str, tuple[int, ...]]) -> None:
        self.hold_all = set(taken) >= set(self.names)

    @property
    def all_serve(self) -> bool:
        return self.hold_all and not self.any_dead

    def ready(self, timeout: float) -> bool:
        return self.answers

    def _updated(self) -> UpdateResult:
        self._wait()
        return self.sent if self.verified[-1] else evolve(self.sent, sums={})

    def received(self, pending: None, timeout: float) -> dict[str, Received]:
        self.waited = timeout
        return self.fared if self.answers else {}

    @property
    def receivers(self) -> tuple[str, ...]:
        return self.names

    def manifest(self, *, adapters: bool = False) -> Future[Any]:
        return Future(self, self.ready, lambda: self.manifests[adapters])

    def rendezvous(self, address: Address) -> Address:
        self.meetings += 1
        return evolve(address, token=f"meeting {self.meetings}")

    def engine_failed(self, address: Address, engine: str, reason: str) -> None:
        self.log.append(f"report {engine}: {reason}")
        self.answers = True  # the ranks wait no more

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        for name, error in failed.items():
            if not self.allowed:
                raise error
            self.log.append(f"replace {name}: {type(error).__name__}: {error.message}")
            self.allowed -= 1
        self.any_dead = self.hold_all = False
        well = {name: Received(bytes=8) for name in self.names}
        self.fared = self.later.pop(0) if self.later else well

    def leave_out(self, hanging: Mapping[str, CorerlError]) -> None:
        self.log += [f"leave out {name}" for name in hanging]

    def step_done(self) -> None:
        self.log.append("completed")

    def _wait(self) -> None:
        assert self.answers, "waited for in vain"
        if self.failure is not None:
            raise self.failure

    def forward(
        self, batch: StoredBatch, outputs: tuple[Output, ...], *, snapshot: str, replay: bool
    ) -> Future[dict[Output, Any]]:
        self.passes.append((outputs, snapshot, replay))
        value = {Output.VALUES: 0.5, Output.LOGPROBS: -2.0 if snapshot == REFERENCE else -1.0}[outputs[0]]
        tokens = len(batch.samples.tokens)
        columns: dict[Output, Any] = {output: np.full(tokens, value, np.float32) for output in outputs}
        return Future(self, self.ready, lambda: columns | ({EXPERTS: CHOSEN} if EXPERTS in outputs else {}))

    plan_steps: Any = TrainGroup.plan_steps
    _require_not_frozen: Any = TrainGroup._require_not_frozen

    def train(self, batch: StoredBatch, plan: StepPlan, loss: LossSpec, step: Step) -> Future[TrainResult]:
        self.losses.append(loss)
        self.changes += 1

        def wait() -> TrainResult:
            self.log.append(f"train at {step.optimizer_step} of {step.rollout_step}")
            return TrainResult(applied=True, metrics={}, grad_norm=float(step.optimizer_step), tokens=5)

        return Future(self, self.ready, wait)


PROMPTS = SortDigits(held_out=16, seed=0)


def plan_of(config: Config, run_dir: Path = Path()) -> Plan:
    """As far as a run that has started reads it."""
    start = Start(run_dir=run_dir, resume=None, state={}, lost=())
    rollout = {each.name: None for each in attrs.fields(RolloutPlan)} | {"settings": config.rollout, "prompts": PROMPTS}
    slices = {each.name: getattr(config, each.name, None) for each in attrs.fields(Plan)}
    return Plan(
        **{
            **slices,
            "start": start,
            "algorithm": plan_algorithm(resolve_tables(config), plugins_of(config)),
            "rollout": RolloutPlan(**rollout),
            "record": to_plain(config),
        }
    )


LOSS = LossSpec(name="clipped", params={"kl_coef": 0.5})


def role(name: str, group: Group | None = None, config: Config | None = None, **parts: Any) -> Role:
    config, group = config or make_config(), group or Group()
    group.role_plan = SimpleNamespace(train=config.train, objective=CLIPPED, max_tokens=7)
    given = {"loss": LOSS, "next_optimizer_step": 0, "rollout_steps": config.run.steps, **parts}
    return Role(
        name=name,
        group=group,  # type: ignore[arg-type]  # the part of a TrainGroup that is used
        train=config.train,
        seed=0,
        **given,
    )


class Source:
    position = "where the prompts stand"
    overlaps = False

    def __init__(self) -> None:
        self.saved: list[Path] = []

    def save(self, checkpoint: Path) -> None:
        self.saved.append(checkpoint)

    def close(self) -> None:
        pass


class Ears:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.ends: list[str] = []

    def observe(self, event: Event) -> None:
        self.heard.append(event)

    def shutdown(self, reason: str) -> None:
        self.ends.append(reason)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.heard if isinstance(event, kind)]

    @property
    def steps(self) -> list[StepFinished]:
        return self.of(StepFinished)

    @property
    def finished(self) -> list[RunFinished]:
        return self.of(RunFinished)

    @property
    def notices(self) -> list[Notice]:
        return self.of(Notice)


def told(ears: Ears) -> list[str]:
    return [notice.text for notice in ears.notices]


def progress(ears: Ears | None = None, *, step: int = 0) -> Progress:
    return Progress(Observers([("ears", ears or Ears())]), step)


def staying() -> Residency:
    """Nobody shares a device."""
    return Residency(progress=progress())


def colocated(groups: Mapping[str, Group], *, passed: Sequence[str] = (), fleet: Group | None = None) -> Residency:
    """The ranks of these roles take turns with the engines in the memory of their devices; they are awake."""
    return Residency(
        stages=residency_stages(list(groups), passed),
        groups=groups,  # type: ignore[arg-type]  # the part of a TrainGroup that is used
        fleet=fleet or Group(),  # type: ignore[arg-type]
        progress=progress(),
    )


def make_engines(
    config: Config, actor: Group, fleet: Group, ears: Ears | None = None, *, version: int = 0, **parts: Any
) -> Engines:
    """`version`: of the weights that the actor's ranks have loaded."""
    actor.loaded_version = version
    given = {
        "address_of": lambda: Address(transport="ipc", engines=fleet.names),
        "residency": staying(),
        "on_death": lambda reasons: None,
        "progress": progress(ears),
        **parts,
    }
    return Engines(config=config.weights, group=actor, fleet=fleet, **given)  # type: ignore[arg-type]
